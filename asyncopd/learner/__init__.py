"""The learner: scored rollouts to gradients, weights and checkpoints."""
