"""The update: credit, batch, objective, policy, critic, learner, adapters."""
