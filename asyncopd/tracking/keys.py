"""Every metric name that the tracking code reads, in one place.

A row of `metrics.jsonl` is `{"policy_version": int, "time": unix seconds, "<name>": number, ...}`. Names are joined
with "/"; a nested mapping given to `log` is flattened the same way, so `{"queue": {"SCORED": 4}}` is "queue/SCORED".
Other names may be logged freely: they are kept and sent to every tracker, only not drawn.

Per optimizer step, at the version that the step produced:
    loss                             what was minimised
    divergence                       estimated divergence to the teacher on the batch, nats per token; with several
                                     objectives in a mixture <part>/divergence
    k1                               mean log p - log q of the sampled tokens, nats
    grad_norm, lr                    gradient norm before clipping; learning rate of the step
    update_ratio                     norm of the step's change of the weights over their norm, sampled (rank 0's part)
    tokens, step_s, wait_s           response tokens trained; seconds in the step; seconds waiting for its batch
    read_s                           of the step: reading the batch's payloads
    forward_s, backward_s            of the step: body, head and loss; gradients. The fused head has its own gradient
    optimizer_s                      ready with the forward, so it counts there. Clipping, update and its sampling
    publish_s                        seconds for which publishing the weights kept the learner from its next step
    tokens_per_s                     response tokens trained over step_s
    mfu                              model FLOPs utilisation over step_s, 0 to 1: `learner.model_flops`. Absent where
                                     the hardware's peak is not known (`tracking.peak_tflops`)
    memory_gb                        most memory so far, 1e9 bytes: of rank 0's process on a CPU, allocated on its GPU
    logprob_gap/staleness_0          mean |log p - log b| over the tokens of staleness 0, nats, and how many those are:
    tokens/staleness_0               how well rollout engine and learner agree, where answers are sampled plainly at the
                                     objective's temperature; else also how the two distributions differ. Absent when
                                     there are none
    <any>/staleness_<bucket>         the same metric over the tokens of one staleness, see `objectives.diagnostics`
    staleness/mean, staleness/max    of the samples trained in this step (a sample is as old as its oldest token)
    staleness/<where>/<age>          number of the step's samples by their age in optimizer steps: what they aged
                                     in_flight (first token to last), in_queue (from then on), and in all (training)
    teacher_written                  share of the step's samples that no student wrote; the ages leave them out
    queue/<STATE>                    samples in each live state of the ledger, after the step; its own are LEASED
                                     while its weights are being written
    restarts                         workers started again so far, since the run was started or resumed
    length_bias                      mean length of the answers trained over that of all generated, minus 1
Per evaluation:
    held_out/reverse_kl/mean, .../ci95     nats per token on fresh answers to held-out prompts; half-width of the 95%
    held_out/forward_kl/mean, .../ci95     interval
    held_out/mean_length/mean, .../ci95    tokens per answer
    held_out/eos_share                     share of the answers that ended with EOS, 0 to 1
"""

LOSS = "loss"
DIVERGENCE = "divergence"
GRAD_NORM = "grad_norm"
UPDATE_RATIO = "update_ratio"
STEP_SECONDS = "step_s"
WAIT_SECONDS = "wait_s"
READ_SECONDS = "read_s"
FORWARD_SECONDS = "forward_s"
BACKWARD_SECONDS = "backward_s"
OPTIMIZER_SECONDS = "optimizer_s"
PUBLISH_SECONDS = "publish_s"
TIMES = (
    STEP_SECONDS,
    WAIT_SECONDS,
    READ_SECONDS,
    FORWARD_SECONDS,
    BACKWARD_SECONDS,
    OPTIMIZER_SECONDS,
    PUBLISH_SECONDS,
)
TOKENS = "tokens"
TOKENS_PER_SECOND = "tokens_per_s"
MFU = "mfu"
MEMORY_GB = "memory_gb"
RESTARTS = "restarts"
LOGPROB_GAP = "logprob_gap/staleness_0"
ON_POLICY_TOKENS = "tokens/staleness_0"

UNSAMPLED = "teacher_written"
STALENESS_MEAN = "staleness/mean"
STALENESS_MAX = "staleness/max"

QUEUE = "queue"
LIVE_STATES = ("PENDING", "ROLLING", "ROLLED", "SCORING", "SCORED", "LEASED")

HELD_OUT_REVERSE_KL = "held_out/reverse_kl"
HELD_OUT_FORWARD_KL = "held_out/forward_kl"
HELD_OUT_LENGTH = "held_out/mean_length"
HELD_OUT_EOS = "held_out/eos_share"

CACHE = "cache"
CACHE_COUNTS = ("hits", "misses", "read_bytes", "kept_bytes")
"""What the score cache did, in the numbers of a scoring span: cache/hits, and so on."""

STAGES = ("rollout", "teacher", "learner")
"""In the order of the data path."""


def staleness_key(place: str, age: int) -> str:
    """Name of the number of samples that aged so many optimizer steps in one place: in_flight, in_queue or training."""
    return f"staleness/{place}/{age}"
