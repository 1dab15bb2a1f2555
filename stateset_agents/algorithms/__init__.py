"""Pure arithmetic on tensors and lists: advantages, losses, KL. No models, no configuration.

advantages      rewards of a group, turns or tokens  ->  advantages          (no torch)
group_arrays    the same of many groups at once      ->  advantages, as arrays
policy_losses   log-probs, ratio, advantages         ->  loss of each token, by `loss_type`
losses          log-probs and advantages             ->  policy, KL, value and entropy loss, whatever the cut
kl_settings     names of estimators; KL of a step    ->  its coefficient     (no torch)
memory          numbers of parameters                ->  bytes of a training (no torch)
"""
