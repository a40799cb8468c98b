"""One fuzz case: a random block under a random policy, put through a random use, beside plain autograd."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from dataclasses import dataclass

import torch
from fuzz.policies import Oracle, draw
from fuzz.programs import generate
from recorded import call_of, tensors_of
from storages import Storages
from torch.autograd.graph import saved_tensors_hooks

from ds_adacc.execute.bound_policy import bind
from ds_adacc.execute.call import Call
from ds_adacc.profile.block_graph import block_graph
from ds_adacc.program.slots import unpack
from ds_adacc.record.capture import capture

OTHER = 1 << 20  # added to a seed: other data
EVERY = 200  # one case of so many is run for 50 steps
USES = ("backward", "twice", "partial", "two calls", "other data", "no_grad between", "autocast")
_LOSSLESS_USES = ("two calls", "other data")


@dataclass
class Case:
    """A program, and how it is used: a sequence of uses of which each occurs or not."""

    program: object
    uses: frozenset[str]
    lot: random.Random
    buffers: dict

    @classmethod
    def of(cls, seed):
        program = generate(seed)
        lot = random.Random(seed)
        uses = {lot.choice(USES[:3])} | {use for use in USES[3:] if lot.random() < 0.2}
        if program.features["hidden_function"]:
            uses -= {"autocast"}  # NumPy has no bfloat16
        buffers = {name: b.clone() for name, b in program.block.named_buffers()}
        return cls(program, frozenset(uses), lot, buffers)

    def ambient(self):
        return torch.autocast("cpu", dtype=torch.bfloat16) if "autocast" in self.uses else contextlib.nullcontext()

    def begin(self, data=0):
        """(leaves, arguments) of a step from its very beginning: buffers, gradients, random state."""
        block = self.program.block
        block.zero_grad()
        with torch.no_grad():
            for name, buffer in block.named_buffers():
                buffer.copy_(self.buffers[name])
        leaves, arguments = self.program.arguments(self.program.seed + data)
        torch.default_generator.manual_seed(self.program.seed)
        return leaves, arguments

    def record(self):
        """The recorded call, its values still alive."""
        _, arguments = self.begin()
        block = self.program.block
        with self.ambient():
            return capture("fuzz", call_of(block, *arguments))

    def instruction(self, run):
        """All that can be seen of one use of `run`: outputs, gradients, buffers, the random state; or its error."""
        leaves, arguments = self.begin(OTHER if "other data" in self.uses else 0)
        try:
            with self.ambient():
                outputs = [run(*arguments)]
                if "no_grad between" in self.uses:
                    with torch.no_grad():
                        self.program.block(*self.program.arguments(OTHER)[1])
                if "two calls" in self.uses:
                    more, others = self.program.arguments(OTHER)
                    leaves = leaves + more
                    outputs.append(run(*others))
            seen = [tensor for output in outputs for tensor in tensors_of(output, {})]
            seen += self._backward([loss_of(output) for output in outputs], leaves)
        except RuntimeError as error:  # of what has been written to in place, most of all
            return str(error)
        return [*seen, *self.program.block.buffers(), torch.get_rng_state()]

    def _backward(self, losses, leaves):
        wanted = list({id(t): t for t in (*leaves, *self.program.block.parameters()) if t.requires_grad}.values())
        lot = random.Random(self.program.seed)
        lot.shuffle(losses)
        seen = []
        for loss in losses:
            if loss.requires_grad and "partial" in self.uses:
                part = lot.sample(wanted, lot.randint(1, len(wanted)))
                seen += torch.autograd.grad(loss, part, retain_graph=True, allow_unused=True)
            if loss.requires_grad:
                loss.backward(retain_graph="twice" in self.uses)
            if loss.requires_grad and "twice" in self.uses:
                seen += [None if t.grad is None else t.grad.clone() for t in wanted]
                loss.backward()
        return [*seen, *(t.grad for t in wanted)]


def loss_of(output):
    """A scalar that depends on every element of the differentiable outputs."""
    graded = [t for t in tensors_of(output, {}) if t.requires_grad]
    return sum(((t.double() * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in graded), torch.zeros(()))


class Checked:
    """Hooks around a call's own: what was saved must come back or, of what a codec touched, what is expected."""

    def __init__(self, block, bound, arguments, oracle=None):
        self.call = Call(bound, tensors_of(arguments, {}))
        self._oracle = oracle
        self._number = 0
        self._written = {b.data_ptr() for b in block.buffers()}  # batch norm writes its statistics after saving them

    def pack(self, tensor):
        number, self._number = self._number, self._number + 1
        expected = self._oracle.position(number) if self._oracle is not None else None
        if expected is None:
            expected = tensor if tensor.data_ptr() in self._written else tensor.clone()
        return self.call.pack(tensor), tensor.stride(), expected.detach()

    @staticmethod
    def unpack(packed):
        slot, stride, expected = packed
        tensor = unpack(slot)
        assert tensor.stride() == stride
        assert same(tensor, expected), "a saved tensor comes back otherwise than it should"
        return tensor


class Kept:
    """A pack hook that keeps the slots alive that the plan counts, also those of nodes that no output depends on.

    Where data decide which branch runs, the plan counts what the block discards.
    """

    def __init__(self, pack, positions):
        self._pack = pack
        self._discarded = [position.discarded for position in positions]
        self._slots = []

    def __call__(self, tensor):
        slot = self._pack(tensor)
        self._slots.append(None if self._discarded[len(self._slots)] else slot)
        return slot


def same(a, b):
    """Whether both are None, or have the same looks and bits."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(torch.cat((t.detach().flatten(), t.new_empty(0))).view(torch.uint8) for t in (a, b)))


def assert_same(plain, ours):
    assert isinstance(plain, str) == isinstance(ours, str), f"plain autograd: {plain}\nours: {ours}"
    if isinstance(plain, str):
        return
    assert len(plain) == len(ours)
    for number, (a, b) in enumerate(zip(plain, ours, strict=True)):
        assert same(a, b), f"number {number} of {len(plain)}: {a} is not {b}"


def check(seed, policies=2):
    """Put the case through all checks; returns the features that occurred. Raises AssertionError with the program."""
    case = Case.of(seed)
    try:
        return _check(case, policies)
    except Exception as error:
        uses = ", ".join(sorted(case.uses))
        raise AssertionError(f"{type(error).__name__}: {error}\nuses: {uses}\n{case.program}") from error


def _check(case, policies):
    plain = case.instruction(case.program.block)
    features = Counter([*case.uses, "error" if isinstance(plain, str) else "gradients"])
    captured = case.record()
    if captured.recording is None:
        return features + Counter(["not recorded", captured.reason.split(" v")[0]])
    graph = block_graph(captured.recording)
    for number in range(policies):
        lossy = number > 0 and not isinstance(plain, str)
        drawn = draw(captured.recording, graph, captured.tensors, case.lot, lossy)
        features.update(["policies", *drawn.choices])
        if drawn.is_lossy:
            features["lossy"] += 1
            _check_lossy(case, drawn, captured)
        else:
            _check_lossless(case, drawn, plain)
    if not isinstance(plain, str):
        _check_bytes(case, drawn, captured)
    if not isinstance(plain, str) and case.program.seed % EVERY == 0:
        _check_leak(case, drawn)
        features["leak"] += 1
    return features


def _check_lossless(case, drawn, plain):
    bound = _bound(drawn)

    def run(*arguments):
        checked = Checked(case.program.block, bound, arguments)
        with saved_tensors_hooks(checked.pack, checked.unpack):
            return case.program.block(*arguments)

    assert_same(plain, case.instruction(run))


def _check_lossy(case, drawn, captured):
    """Of the recorded call itself: its gradients are those of plain autograd on the tensors expected."""
    case.uses -= set(_LOSSLESS_USES)
    oracle, bound = Oracle(drawn, captured.tensors), _bound(drawn)
    oracle.check_bounds()

    def plain(*arguments):
        numbers = iter(range(len(drawn.recording.positions)))

        def pack(tensor):
            expected = oracle.position(next(numbers))
            return tensor if expected is None else expected

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return case.program.block(*arguments)

    def ours(*arguments):
        checked = Checked(case.program.block, bound, arguments, oracle)
        with saved_tensors_hooks(checked.pack, checked.unpack):
            output = case.program.block(*arguments)
        assert not checked.call.diverged, "the recorded call, repeated, takes another course"
        return output

    assert_same(case.instruction(plain), case.instruction(ours))


def _check_bytes(case, drawn, captured):
    """When backward may begin, exactly what the policy says is held, and when the graph is gone, nothing."""
    leaves, arguments = case.begin()
    bound = _bound(drawn)
    with Storages() as storages, case.ambient():
        call = Call(bound, tensors_of(arguments, {}))
        pack = Kept(call.pack, drawn.recording.positions)
        with saved_tensors_hooks(pack, unpack):
            output = case.program.block(*arguments)
        assert not call.diverged, "the recorded call, repeated, takes another course"
        call.close()
    nodes = [t.grad_fn for t in tensors_of(output, {}) if t.grad_fn is not None]
    del output
    held, planned = storages.alive(), drawn.held_bytes(captured.tensors)
    assert held == planned, f"{held} bytes are held, planned: {planned}"
    del nodes, leaves, arguments, pack, call
    assert storages.alive() == 0, "something outlives the graph"


def _check_leak(case, drawn):
    """After 50 steps as many bytes are alive as after 5."""
    bound, alive = _bound(drawn), []

    def run(*arguments):
        call = Call(bound, tensors_of(arguments, {}))
        with saved_tensors_hooks(call.pack, unpack):
            return case.program.block(*arguments)

    with Storages() as storages:
        for _ in range(50):
            case.instruction(run)
            case.program.block.zero_grad()
            alive.append(storages.alive())
    assert alive[4] == alive[49], f"{alive[4]} bytes after 5 steps, {alive[49]} after 50"


def _bound(drawn):
    return bind(drawn.recording, drawn.policy, drawn.codecs, drawn.prefetcher)
