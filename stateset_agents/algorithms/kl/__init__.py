"""KL to the reference policy: estimators, what the loss or the reward pays for it, and how beta adapts."""
