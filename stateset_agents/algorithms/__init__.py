"""Pure arithmetic on tensors and lists: advantages, losses, KL. No models, no configuration.

advantages      rewards of a group, turns or tokens  ->  advantages          (no torch)
branching       turns and branches from them         ->  advantages          (no torch)
aggregation     one number per trained token         ->  one loss, whatever the micro-batches
policy_losses   log-probs, ratio, advantages         ->  loss of each token, by `loss_type`
losses          log-probs and advantages             ->  policy, value and entropy loss
kl_estimators   log ratio to the reference           ->  KL of each token, by `kl_estimator`
kl              log-probs of policy and reference    ->  KL loss or reward
kl_controllers  KL of a step                         ->  its coefficient     (no torch)
memory          numbers of parameters                ->  bytes of a training (no torch)
"""
