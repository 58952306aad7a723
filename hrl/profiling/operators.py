"""Which class an operator belongs to, and how much of its process's time a class took.

On a CPU an operator's seconds are its own, without those of the operators that it calls. With a GPU they are those of
the kernels that it launched, and the host's own time does not count.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hrl.profiling.spans import OPTIMIZER, PHASE

PRODUCTS, ATTENTION, COPIES, ELEMENTWISE = "matrix products", "attention", "copies and casts", "elementwise"
OPTIMIZERS, COMMUNICATION, OTHER = "optimizer", "communication", "other"
CLASSES = (PRODUCTS, ATTENTION, COPIES, ELEMENTWISE, OPTIMIZERS, COMMUNICATION, OTHER)
"""Classes of operators, in the order in which they are shown. Sums, norms and softmax are elementwise."""
#: Classes whose operators are made of others, which count as theirs.
_WHOLE = (ATTENTION, OPTIMIZERS, COMMUNICATION)
#: The phase of what runs in none.
BETWEEN = "between phases"
MOST_OPERATORS = 12

#: Names of operators without namespace, trailing underscores and `.out`.
_NAMES = {
    PRODUCTS: """
        mm addmm bmm baddbmm addbmm mv addmv dot linear mkldnn_linear linear_pointwise einsum conv1d convolution
        _scaled_mm _grouped_mm _scaled_grouped_mm _int_mm onednn_mm onednn_scaled_mm cutlass_scaled_mm cpu_gemm_wna16
        weight_packed_linear wide_mm
    """,
    COPIES: """
        copy to _to_copy clone contiguous cat _chunk_cat stack split_with_sizes_copy _foreach_copy fill zero zeros
        zeros_like ones ones_like full full_like index index_put _index_put_impl index_select index_add index_copy
        gather scatter scatter_add masked_select masked_scatter nonzero embedding embedding_dense_backward
        slice_backward select_backward constant_pad_nd repeat repeat_interleave reshape_and_cache _local_scalar_dense
    """,
    ELEMENTWISE: """
        add sub rsub mul div remainder floor_divide fmod pow neg exp exp2 log log2 log1p sqrt rsqrt reciprocal abs
        square sgn sign sin cos erf sigmoid sigmoid_backward tanh tanh_backward silu silu_backward silu_and_mul gelu
        gelu_backward relu threshold_backward clamp where masked_fill eq ne lt le gt ge isfinite logical_and logical_or
        logical_not bitwise_and bitwise_or bitwise_not bitwise_xor addcmul addcdiv lerp sum mean norm linalg_vector_norm
        amax amin max min maximum minimum argmax argsort sort topk cumsum all any softmax _softmax log_softmax
        _log_softmax logsumexp _softmax_backward_data _log_softmax_backward_data rms_norm fused_add_rms_norm
        _fused_rms_norm layer_norm native_layer_norm native_dropout rotary_embedding exponential _foreach_mul
        _foreach_add _foreach_norm
    """,
}
_CLASS_OF_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_ATTENTION = re.compile(r"attention|attn|flash_fwd|flash_bwd|fmha|mla_|varlen", re.IGNORECASE)
_COMMUNICATION = re.compile(
    r"^(c10d|_c10d|nccl|gloo|record_param_comms|symm_mem|vllm::all_|FSDP::\w*(gather|reduce))|ncclDevKernel"
    r"|all_?reduce|all_?gather|reduce_?scatter",
    re.IGNORECASE,
)
#: Kernels that belong to no operator: those of a CUDA graph, and of compiled code.
_KERNELS = (
    (OPTIMIZERS, re.compile(r"adam", re.IGNORECASE)),
    (PRODUCTS, re.compile(r"gemm|gemv|cutlass|xmma|nvjet|matmul|cublas|_mm_|wgmma", re.IGNORECASE)),
    (COPIES, re.compile(r"memcpy|memset|copy|cat_?array|index|gather|scatter|fill|reshape_and_cache", re.IGNORECASE)),
    (ELEMENTWISE, re.compile(r"elementwise|vectorized|reduce|softmax|norm|triton_|act_and_mul|rotary", re.IGNORECASE)),
)


class Event(NamedTuple):
    """What a profiler saw: an operator or a range of the host, or a kernel of a device.

    Attributes:
        name: Of the operator, range or kernel.
        start_ns: When it began.
        end_ns: When it ended.
        thread: Of the host.
        flops: Floating-point operations, for products whose shapes are known; 0 for others.
        is_span: Whether it is a range of `spans` and no operator.
        id: Of an operator, to which kernels refer.
        of: The operator that launched this kernel; None for what runs on the host, 0 for a kernel without one.
    """

    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    flops: int = 0
    is_span: bool = False
    id: int = 0
    of: int | None = None


@dataclass
class Spent:
    """What operators took.

    Attributes:
        seconds: Their own time; of operators that ran at once, each one's.
        calls: How many there were.
        flops: Of the matrix products whose operations are known.
        flop_seconds: The time of those.
    """

    seconds: float = 0.0
    calls: float = 0
    flops: float = 0.0
    flop_seconds: float = 0.0

    def add(self, seconds: float, calls: float = 1, flops: float = 0.0, flop_seconds: float = 0.0) -> None:
        """Count further operators."""
        self.seconds += seconds
        self.calls += calls
        self.flops += flops
        self.flop_seconds += flop_seconds

    @property
    def gflop_per_s(self) -> float | None:
        """10⁹ floating-point operations a second, of those that are known."""
        return self.flops / self.flop_seconds / 1e9 if self.flop_seconds > 0 else None


@dataclass
class Phase:
    """A phase of a profile.

    Attributes:
        seconds: On the clock.
        busy: Seconds of these in which any operator (with a GPU: kernel) ran.
        classes: What each class of operators took.
    """

    seconds: float = 0.0
    busy: float = 0.0
    classes: dict[str, Spent] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return the phase as dicts and numbers."""
        return {
            "seconds": self.seconds,
            "busy": self.busy,
            "classes": {kind: vars(spent).copy() for kind, spent in self.classes.items()},
        }


@dataclass
class Profile:
    """What one process did with its time, or the mean of several.

    Attributes:
        phases: By name, in the order in which they ran.
        operators: (class, operator) → what it took, of those that took most.
    """

    phases: dict[str, Phase] = field(default_factory=dict)
    operators: dict[tuple[str, str], Spent] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Return the profile as dicts, lists and numbers, which pass between any two processes."""
        return {
            "phases": {name: phase.to_plain() for name, phase in self.phases.items()},
            "operators": [[*key, vars(spent).copy()] for key, spent in self.operators.items()],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Profile:
        """Undo `to_plain`."""
        phases = {
            name: Phase(
                phase["seconds"], phase["busy"], {kind: Spent(**spent) for kind, spent in phase["classes"].items()}
            )
            for name, phase in plain["phases"].items()
        }
        return cls(phases, {(kind, name): Spent(**spent) for kind, name, spent in plain["operators"]})

    @classmethod
    def mean(cls, profiles: Sequence[Profile]) -> Profile:
        """Return the mean of the processes' seconds, calls and operations."""
        result, share = cls(), 1 / max(len(profiles), 1)
        for profile in profiles:
            for name, phase in profile.phases.items():
                whole = result.phases.setdefault(name, Phase())
                whole.seconds += phase.seconds * share
                whole.busy += phase.busy * share
                for kind, spent in phase.classes.items():
                    _add_part(whole.classes.setdefault(kind, Spent()), spent, share)
            for key, spent in profile.operators.items():
                _add_part(result.operators.setdefault(key, Spent()), spent, share)
        result.operators = _largest(result.operators)
        return result

    @property
    def classes(self) -> dict[str, Spent]:
        """What each class took in all phases, in the order of `CLASSES`."""
        found = {kind: Spent() for kind in CLASSES}
        for phase in self.phases.values():
            for kind, spent in phase.classes.items():
                _add_part(found[kind], spent, 1.0)
        return {kind: spent for kind, spent in found.items() if spent.calls}


def _add_part(whole: Spent, part: Spent, share: float) -> None:
    whole.add(part.seconds * share, part.calls * share, part.flops * share, part.flop_seconds * share)


def _largest(operators: dict[tuple[str, str], Spent]) -> dict[tuple[str, str], Spent]:
    return dict(sorted(operators.items(), key=lambda item: -item[1].seconds)[:MOST_OPERATORS])


# ---- classes ---------------------------------------------------------------------------------------------------


def class_of(name: str, within: str | None = None) -> str:
    """Return the class of an operator.

    Args:
        name: As the profiler has it, such as `aten::mm`.
        within: Class of the operator or range that called it, if any.
    """
    if within in _WHOLE:
        return within
    if name == OPTIMIZER or "adam" in name.lower():
        return OPTIMIZERS
    if _COMMUNICATION.search(name):
        return COMMUNICATION
    if _ATTENTION.search(name):
        return ATTENTION
    return _CLASS_OF_NAME.get(name.rpartition("::")[2].rstrip("_").removesuffix(".out"), OTHER)


def class_of_kernel(name: str) -> str:
    """Return the class of a kernel that belongs to no known operator."""
    if _COMMUNICATION.search(name):
        return COMMUNICATION
    if _ATTENTION.search(name):
        return ATTENTION
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), OTHER)


# ---- sums ------------------------------------------------------------------------------------------------------


class _Counted(NamedTuple):
    """Something whose seconds count."""

    name: str
    kind: str
    start_ns: int
    end_ns: int
    own_ns: int
    flops: int


def profile_of(events: Iterable[Event], rest: str = BETWEEN) -> Profile:
    """Sum up what a profiler saw in one process.

    Args:
        events: Those of its host threads and its devices.
        rest: The phase of what runs in none.
    """
    events = list(events)
    host = [event for event in events if event.of is None]
    kernels = [event for event in events if event.of is not None]
    operators = list(_own_times(host))
    if kernels:
        kind_of = {event.id: (event, kind) for event, kind, _ in operators if not event.is_span}
        counted = list(_of_kernels(kernels, kind_of))
    else:
        counted = [
            _Counted(event.name, kind, event.start_ns, event.end_ns, own_ns, event.flops)
            for event, kind, own_ns in operators
            if not event.is_span
        ]
    return _summed(counted, _phases(host), rest)


def _own_times(host: Sequence[Event]) -> Iterator[tuple[Event, str, int]]:
    """Yield each event of the host with its class and its own nanoseconds, without those of what it called."""
    by_thread: dict[int, list[Event]] = defaultdict(list)
    for event in host:
        by_thread[event.thread].append(event)
    for of_thread in by_thread.values():
        of_thread.sort(key=lambda event: (event.start_ns, -event.end_ns))
        open_events: list[list[Any]] = []  # event, class, own nanoseconds

        def ended(until: int, open_events: list[list[Any]] = open_events) -> Iterator[tuple[Event, str, int]]:
            while open_events and open_events[-1][0].end_ns <= until:
                event, kind, own_ns = open_events.pop()
                yield event, kind, max(own_ns, 0)

        for event in of_thread:
            yield from ended(event.start_ns)
            within = None
            if open_events:
                open_events[-1][2] -= event.end_ns - event.start_ns
                within = open_events[-1][1]
            open_events.append([event, class_of(event.name, within), event.end_ns - event.start_ns])
        yield from ended(max(event.end_ns for event in of_thread))


def _of_kernels(kernels: Sequence[Event], launched_by: dict[int, tuple[Event, str]]) -> Iterator[_Counted]:
    """Yield the kernels under the names and classes of their operators; an operator's operations count once."""
    counted: set[int] = set()
    for kernel in kernels:
        operator = launched_by.get(kernel.of or 0)
        if operator is None:
            name, kind, flops = kernel.name, class_of_kernel(kernel.name), 0
        else:
            event, kind = operator
            name, flops = event.name, 0 if event.id in counted else event.flops
            kind = class_of_kernel(kernel.name) if kind == OTHER else kind
            counted.add(event.id)
        yield _Counted(name, kind, kernel.start_ns, kernel.end_ns, kernel.end_ns - kernel.start_ns, flops)


def _phases(host: Sequence[Event]) -> list[Event]:
    """Return the ranges that are phases, in order; a phase within a phase is part of it."""
    found = sorted((e for e in host if e.is_span and e.name.startswith(PHASE)), key=lambda e: (e.start_ns, -e.end_ns))
    outermost: list[Event] = []
    for event in found:
        if not outermost or event.start_ns >= outermost[-1].end_ns:
            outermost.append(event)
    return outermost


def _summed(counted: list[_Counted], phases: list[Event], rest: str) -> Profile:
    counted.sort(key=lambda each: each.start_ns)
    starts = [phase.start_ns for phase in phases]
    result, until_ns, has_flops = Profile(), 0, {each.name for each in counted if each.flops}
    for event in phases:
        result.phases.setdefault(event.name.removeprefix(PHASE), Phase()).seconds += _seconds(event)
    operators: dict[tuple[str, str], Spent] = defaultdict(Spent)
    for each in counted:
        place = bisect_right(starts, each.start_ns) - 1
        inside = place >= 0 and each.start_ns < phases[place].end_ns
        phase = result.phases.setdefault(phases[place].name.removeprefix(PHASE) if inside else rest, Phase())
        # Kernels run after the host has launched them: those of the end of a phase may run in the next one.
        phase.busy += max(each.end_ns - max(each.start_ns, until_ns), 0) / 1e9
        until_ns = max(until_ns, each.end_ns)
        seconds = each.own_ns / 1e9
        rated = each.kind == PRODUCTS and each.name in has_flops
        flops, known = (each.flops, seconds) if rated else (0, 0.0)
        phase.classes.setdefault(each.kind, Spent()).add(seconds, 1, flops, known)
        operators[each.kind, each.name].add(seconds, 1, flops, known)
    result.operators = _largest(operators)
    return result


def _seconds(event: Event) -> float:
    return (event.end_ns - event.start_ns) / 1e9
