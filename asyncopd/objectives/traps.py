"""Losses that look right and are not; asking for one by name explains why it is refused."""

TRAPS = {
    "k1": (
        "the gradient of log p - log q on sampled tokens does not depend on the teacher; use reverse_kl with design "
        "sampled, or pg_recompute"
    ),
    "k2": (
        "half the squared log ratio has the reverse KL's gradient on fresh tokens only, and not its value; use "
        "reverse_kl with design sampled, whatever the staleness"
    ),
    "k3": (
        "the gradient of q/p - 1 - log(q/p) on sampled tokens is that of the other direction, forward_kl; use "
        "reverse_kl with design sampled, which is its Bregman form weighted by p/b"
    ),
    "topk_reward": (
        "a detached reward summed over the top tokens has zero expected gradient; use reverse_kl with design top_k"
    ),
    "topk_renormalised": (
        "renormalising over the top tokens gives zero loss at K = 1 and ignores missing mass; use design top_k_tail"
    ),
    "kl_clamped": (
        "clamping the divergence removes the gradient exactly where the loss is wrong; use form bregman, which is "
        "never negative"
    ),
}
