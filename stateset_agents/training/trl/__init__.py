"""The update by TRL's GRPOTrainer."""
