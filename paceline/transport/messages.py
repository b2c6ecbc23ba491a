"""What workers and server say to each other; ``paceline.transport.wire`` makes bytes of it."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, TypeAlias

Count: TypeAlias = Annotated[int, "0 to 2^64-1"]
Kind: TypeAlias = Literal["gradient", "difference", "parameters"]  # of pushes, as ``policies.messages.PushKind``


class Described(NamedTuple):
    """One tensor of the model, by which server and worker see that they have the same."""

    name: str
    shape: tuple[Count, ...]
    dtype: str
    trained: bool


class Hello(NamedTuple):
    """Worker: I want to take part, with this model."""

    rank: int  # -1: give me one
    incarnation: Count
    pid: Count
    host: str
    local: bool  # shares the server's memory
    model: tuple[Described, ...]


class Data(NamedTuple):
    """Worker: this is what batch numbers are numbers of."""

    num_samples: Count
    batch_size: Count
    last: Literal["short", "drop", "pad"]
    shuffle: bool
    checksum: Count = 0  # of some of it; 0: not made


class Ask(NamedTuple):
    """Worker: give me a step."""

    epochs: int  # with a batch of an epoch below this; -1: my data is my own
    number: Count  # of this worker's asking; what answers an earlier one is no longer wanted
    version: Count = 0  # of the parameters that it has


class PushMessage(NamedTuple):
    """Worker: the gradients of a step."""

    step: Count
    version: Count
    examples: Count
    loss: float  # NaN: none was told
    seconds: float  # of computing
    finite: bool  # the worker has looked at what it put into shared memory, and found so
    checksum: Count  # then
    used: bytes  # one bit per parameter: it has a gradient


class Skip(NamedTuple):
    """Worker: the step is given up and its batch used."""

    step: Count
    version: Count = 0  # of the parameters that it was computed with


class More(NamedTuple):
    """Worker: one more batch for the same step."""

    step: Count


MOST_VALUES = 2000  # of a Mean, so that their mean fits into a message with all its digits


class Mean(NamedTuple):
    """Worker: average these values over all workers."""

    epoch: Count  # that it is in
    key: str
    weight: float
    values: tuple[float, ...]


class Save(NamedTuple):
    """Worker: write a checkpoint."""

    path: str


class Record(NamedTuple):
    """Worker: put a line into the metrics."""

    event: str
    values: str  # a JSON object


class Alive(NamedTuple):
    """Either: I am still here."""


class Leave(NamedTuple):
    """Worker: I have ended."""

    failed: bool
    version: Count = 0  # of the parameters that it has


class Welcome(NamedTuple):
    """Server: you take part."""

    rank: Count
    world_size: Count
    seed: int
    version: Count
    incarnation: Count
    slots: Count  # of gradients, in memory that is shared
    epoch: Count  # the first one that is not done
    shards: tuple[str, ...] = ()  # where the other servers are, which hold the rest of the parameters
    with_reads: bool = False  # a push has also the parameters that it was computed from
    kind: Kind = "gradient"
    local_steps: Count = 1  # before a push
    coded: bool = False  # a step is some parts of a round, whose gradients are added up by weights
    local_momentum: float = 0.0  # of these steps
    codec: str = ""  # its text form; "": none
    packet_parts: Count = 1  # into which gradients are cut for it, one for each server
    packets: bool = True  # a push has packets; else what they say, which is so in a replay
    kept: bool = False  # what its codec remembers is in the memory of the host, and goes on from an earlier run


class Go(NamedTuple):
    """Server: compute this step; one under way is cancelled."""

    step: Count
    version: Count
    fresh: bool  # the parameters are to be read anew
    epoch: int
    batch: int  # -1: none
    ask: Count  # the number of the Ask that it answers
    doomed: bool = False  # to be cancelled as soon as it computes anything: in a replay, as it was then
    more: Count = 0  # batches that are to be asked for before the push
    weight: float = 1.0  # of the batch, in a sum
    exchanged: int = -1  # the step of the push of which what was added comes in place of the trained parameters
    taken: int = -1  # the step of the worker's last push that was taken
    packet: bool = False  # a packet comes in place of the parameters


class BatchMessage(NamedTuple):
    """Server: one more batch for the same step."""

    step: Count
    epoch: int
    batch: int
    weight: float = 1.0  # of the batch, in a sum


class Finished(NamedTuple):
    """Server: there are no more batches; the parameters of this version are to be read."""

    version: Count
    ask: Count
    taken: int = -1  # the step of the worker's last push that was taken


class Averaged(NamedTuple):
    """Server: the values of a Mean, averaged."""

    key: str
    values: tuple[float, ...]


class Saved(NamedTuple):
    """Server: the checkpoint is written."""

    path: str


class Warned(NamedTuple):
    """Server: what you pushed is left out, and you go on."""

    reason: str


class Unknown(NamedTuple):
    """Server: you take no part (any more); say Hello again."""


class Over(NamedTuple):
    """Server: the run ends here, in the middle; end the script."""


class Refused(NamedTuple):
    """Server: what you asked or sent is not accepted."""

    reason: str


# Between workers and the servers beside the first, each of which holds a part of the parameters.


class Attach(NamedTuple):
    """Worker: parts of this rank's pushes come from here, and parameters go here; answered by Took(0)."""

    rank: Count


class Part(NamedTuple):
    """Worker: this server's part of a push, which the first server hears of when all have theirs."""

    step: Count


class Took(NamedTuple):
    """Server: the part has come."""

    step: Count


class Parameters(NamedTuple):
    """Server: its part of the parameters."""

    version: Count
    exchanged: bool = False  # what was added for the worker's push comes in their place


# Orders of the first server to each of the others, numbered, done one after the other and answered by Done.


class Begin(NamedTuple):
    """Take the parameters and the state that lie in the memory, as of a version, and serve."""

    number: Count
    version: Count
    workers: Count
    state: Count  # bytes of it; 0: what a server that was killed has kept
    adds_up: bool  # as the policy's
    aggregator: str  # its text form
    kind: Kind
    codec: str = ""  # its text form; "": none


class Examine(NamedTuple):
    """Look at a part: its checksum, and what is not finite."""

    number: Count
    rank: Count
    step: Count
    shared: bool  # it lies in the memory


class Take(NamedTuple):
    """Take a part, for a commit to come."""

    number: Count
    rank: Count
    step: Count
    examples: Count
    shared: bool
    alone: bool  # the commit that follows at once is of this part alone
    used: bytes  # one bit per parameter of the part


class Choose(NamedTuple):
    """The next Compare or Ready is of this part, and of the others that are chosen, each with its weight."""

    number: Count
    rank: Count
    step: Count
    weight: float


class Compare(NamedTuple):
    """Compare the chosen parts in pairs, and put the numbers into the memory."""

    number: Count


class Ready(NamedTuple):
    """Have the gradients of a commit ready, and say how long each is if they are to be clipped.

    It is of the parts that were chosen, or the mean of all that were taken.
    """

    number: Count
    version: Count  # of the parameters that it makes


class Update(NamedTuple):
    """Make the commit."""

    number: Count
    version: Count
    norm: float  # of all gradients; NaN: they are not clipped


class Decided(NamedTuple):
    """The last commit stays, whoever is killed: prepare for the next."""

    number: Count


class Give(NamedTuple):
    """Send a worker the parameters, as they are now."""

    number: Count
    rank: Count
    version: Count
    exchanged: bool  # or what was added for its last push, in their place


class Tell(NamedTuple):
    """Put the optimizers' state into the memory, for a checkpoint."""

    number: Count


class CountBytes(NamedTuple):
    """Say how many bytes each worker's connections have brought and taken, as a JSON object by rank."""

    number: Count


class End(NamedTuple):
    """The run is over."""

    number: Count


MISSING_PART = b"\0"  # in place of the name of what is not finite: not all of the push has come


class Done(NamedTuple):
    """The order is carried out."""

    number: Count
    value: Count = 0  # a checksum, or how many bytes
    result: bytes = b""


Message: TypeAlias = (
    Hello | Data | Ask | PushMessage | Skip | More | Mean | Save | Record | Alive | Leave
    | Welcome | Go | BatchMessage | Finished | Averaged | Saved | Warned | Unknown | Refused | Over
    | Attach | Part | Took | Parameters
    | Begin | Examine | Take | Choose | Compare | Ready | Update | Decided | Give | Tell | CountBytes | End | Done
)  # fmt: skip

KINDS: dict[int, type[Message]] = {
    1: Hello,
    2: Data,
    3: Ask,
    4: PushMessage,
    5: Skip,
    6: More,
    7: Mean,
    8: Save,
    9: Alive,
    10: Leave,
    11: Record,
    32: Welcome,
    33: Go,
    34: BatchMessage,
    35: Finished,
    36: Averaged,
    37: Saved,
    38: Refused,
    39: Warned,
    40: Unknown,
    41: Over,
    64: Attach,
    65: Part,
    66: Took,
    67: Parameters,
    80: Begin,
    81: Examine,
    82: Take,
    83: Ready,
    84: Update,
    85: Give,
    86: Tell,
    87: End,
    88: Done,
    89: Decided,
    90: Choose,
    91: Compare,
    92: CountBytes,
}
