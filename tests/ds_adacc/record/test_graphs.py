"""A graph of torch.compile as an operator of the recorded program (Rule R17)."""

import copy
import functools
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import zoo
from cases import further
from functions import Plain
from functorch.compile import aot_function, nop
from recorded import call_of, profile_of, random_policy, record, under
from torch import nn

from ds_adacc import planner
from ds_adacc.kernels import make_codec
from ds_adacc.program.function_operator import FunctionOperator
from ds_adacc.program.graphs import GraphRun, extended, extents, is_graph, run_in_cuda_graphs
from ds_adacc.program.nodes import graphs_behind
from ds_adacc.record.capture import capture

BACKENDS = ["aot_eager", further("inductor")]  # other tests of this file have Inductor make the code
CURRICULUM = {"adds": False, "times": 3}  # what a global decides


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()


def gpt(dropout=0.0):
    return zoo.GPTBlock(zoo.WIDTH, 4, dropout=dropout), (torch.randn(2, 9, zoo.WIDTH, requires_grad=True),)


def llama():
    x = torch.randn(2, 9, 64, requires_grad=True)
    return zoo.LlamaBlock(64, 4, 2), (x, zoo.rope(9, 16))


@pytest.mark.parametrize(
    ("make", "backend"),
    [(functools.partial(gpt, 0.2), "inductor"), (functools.partial(gpt, 0.2), "aot_eager"), (llama, "aot_eager")],
    ids=["dropout", "dropout, eager", "llama, eager"],
)
def test_a_graph_is_replayed_with_the_same_bits(make, backend):
    torch.manual_seed(0)
    block, args = make()
    compiled = torch.compile(block, backend=backend)
    recording = record(compiled, args, {})
    (op,) = recording.ops
    assert op.replayable and recording.graphs == (GraphRun(op.func.cls, ()),) and is_graph(op.func.cls)
    assert not recording.has_hooks, "AOTAutograd sets some while it traces"
    recompute = planner.recompute_policy(profile_of(recording))
    for policy in (recompute, *(random_policy(recording, seed) for seed in range(4))):
        run, calls = under(compiled, recording, policy)
        zoo.assert_same_bits(seeded(compiled, args), seeded(compiled, args, run))
        assert not calls[-1].diverged


def seeded(block, args, *run):
    torch.manual_seed(7)
    return zoo.gradients(block, args, {}, *run)


@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_that_save_what_looks_the_same_are_of_two_types(backend):
    """Gradient errors and policies are known by type, also in the next run."""
    x = torch.randn(3, 5, requires_grad=True)
    digests = []
    for function in (torch.sin, torch.cos, torch.sin):
        torch._dynamo.reset()
        layer = nn.Module()
        layer.forward = torch.compile(lambda x, f=function: f(x * 200) * 2, backend=backend)
        digests.append(record(layer, (x,), {}).digest)
    assert digests[0] == digests[2] != digests[1]


def test_views_of_one_memory_are_one_value():
    """Query, key and value of a GPT are parts of what one product has made."""
    block, args = gpt()
    recording = record(torch.compile(block, backend="aot_eager"), args, {})
    (product,) = [value for value in recording.values if value.role == "query"]
    assert product.nbytes == 3 * args[0].nbytes
    assert sum(product.index == getattr(position.ref, "index", None) for position in recording.positions) == 3


def test_extents():
    product, alone, twice = torch.arange(24.0), torch.zeros(3), torch.ones(4)
    saved = [product[8:16], alone, product[0:8], product[:0], product[20:], twice, twice]
    assert extents(saved, [twice]) == ((-8, 24), None, None, None, None, None, None)
    assert extents([product[20:].view(torch.int32), product[:4]], []) == ((-20, 24), None)
    assert extents([product[4:8]], []) == ((-4, 24),), "it keeps the whole storage"
    assert extents([torch.zeros(9, dtype=torch.uint8)[:8].view(torch.float32)], []) == (None,)
    assert torch.equal(extended(saved[0], (-8, 24)), product)
    assert extended(alone, None) is alone


def test_a_call_that_has_run_another_graph_keeps_all():
    block, args = gpt()
    compiled = torch.compile(block, backend="aot_eager")
    recording = record(compiled, args, {})
    expected = zoo.gradients(compiled, args, {})
    run, calls = under(compiled, recording)
    torch._dynamo.reset()  # the same code, compiled once more: another graph
    output = run(*args)
    assert graphs_behind(output, 0) and graphs_behind(output, 0) != recording.graphs
    assert calls[0].diverged
    torch._dynamo.reset()
    zoo.assert_same_bits(expected, zoo.gradients(compiled, args, {}, run))
    assert calls[1].diverged


def test_graphs_behind_an_output_are_those_since_the_block_began():
    first, second = (torch.compile(nn.Linear(4, 4), backend="aot_eager") for _ in range(2))
    hidden = first(torch.randn(2, 4))
    since = torch.autograd._get_sequence_nr()
    output = second(hidden)
    (of_first,), (of_second,) = graphs_behind(hidden, 0), graphs_behind(output, since)
    assert graphs_behind(output, 0) == (of_first, of_second)
    assert graphs_behind((output.detach(), None), 0) == ()


class Mixing(nn.Module):
    """Reads a tensor with a history of graphs that it is not given."""

    def __init__(self, other):
        super().__init__()
        self.fc = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="aot_eager")
        self.other = [other]

    def forward(self, x):
        return self.fc(x) * self.other[0]


def test_graphs_before_the_block_do_not_count():
    x = torch.randn(3, 6, requires_grad=True)
    block = Mixing(torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="aot_eager")(x))
    recording = record(block, (x,), {})
    assert len(recording.graphs) == 1 and recording.graph_ops[0].replayable


class CompiledFunction(torch.autograd.Function):
    """Looks like a graph with attention that drops nothing: its generator's state is memory nobody has written to."""

    metadata = SimpleNamespace(input_info=[None], mutated_graph_handled_indices=[])
    runs = 0

    @staticmethod
    def forward(ctx, x):
        CompiledFunction.runs += 1
        out = x.sin()
        ctx.save_for_backward(out.cos(), torch.full((2,), CompiledFunction.runs), x)
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


CompiledFunction.__module__ = "torch._functorch._aot_autograd.runtime_wrappers"


class Fused(nn.Module):
    def forward(self, x):
        return CompiledFunction.apply(x) * 2


def test_the_state_of_a_generator_is_held_and_never_compared():
    fused, args = Fused(), (torch.randn(3, 5, requires_grad=True),)
    recording = record(fused, args, {})
    (op,) = [op for op in recording.ops if isinstance(op.func, FunctionOperator)]
    assert op.replayable, op.refusal
    run, _ = under(fused, recording)
    before = CompiledFunction.runs
    zoo.assert_exact(fused, args, {}, run)
    assert CompiledFunction.runs == before + 3, "two forwards and one replay"


def test_where_cuda_graphs_run():
    from torch._inductor import cudagraph_trees as trees

    device, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert not run_in_cuda_graphs(device)
    trees.get_container(0)
    assert not run_in_cuda_graphs(device), "nothing has run there"
    trees.local.tree_manager_containers[0].tree_manager = object()
    try:
        assert run_in_cuda_graphs(device) and not run_in_cuda_graphs(cpu)
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(run_in_cuda_graphs(device)))
        thread.start()
        thread.join()
        assert elsewhere == [False]
    finally:
        del trees.local.tree_manager_containers[0]


def test_cuda_graphs_are_never_replayed(monkeypatch):
    monkeypatch.setattr("ds_adacc.record.calls.function_call.run_in_cuda_graphs", lambda device: True)
    recording = record(Fused(), (torch.randn(3, 5, requires_grad=True),), {})
    assert [op.refusal for op in recording.ops if op.is_function] == [
        'torch.compile runs it as a CUDA graph (mode="reduce-overhead" or "max-autotune"), and a second run overwrites '
        "what the first has made"
    ]


GENERATED: dict = {}
exec("def guard(check): return check()", GENERATED)


class Guarded(nn.Module):
    """Runs what Dynamo's guards run in some versions, for a float that varies."""

    def forward(self, x):
        assert GENERATED["guard"](lambda: torch.tensor(0.5).item()) == 0.5
        return x.sin().exp()


def test_what_dynamos_guards_read_is_no_part_of_the_block():
    recording = record(Guarded(), (torch.randn(3, 5, requires_grad=True),), {})
    assert [(op.short_name, op.refusal) for op in recording.ops] == [("sin", None), ("exp", None)]


class Counting(nn.Module):
    """A graph that writes to a buffer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.fc(x)) * self.calls


class Scaling(nn.Module):
    """A graph that writes to a weight."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        out = torch.tanh(self.fc(x))
        with torch.no_grad():
            self.fc.bias.mul_(1.5)
        return out


class Clamping(nn.Module):
    """Graphs that write to a weight and to a buffer what is there already."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("flag", torch.ones(()))

    def forward(self, x):
        with torch.no_grad():
            self.fc.bias.clamp_(-9, 9)
        self.flag.fill_(1)
        return torch.tanh(self.fc(x)) * self.flag


@pytest.mark.matrix
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [Counting, Scaling, Clamping])
def test_a_graph_that_writes_is_never_run_again(make, backend):
    torch.manual_seed(0)
    block, x = make(), torch.randn(3, 6, requires_grad=True)
    twin = copy.deepcopy(block)
    twin(x)
    compiled = torch.compile(block, backend=backend)
    found = capture("block", call_of(compiled, x))
    for mine, its in zip(block.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(mine, its), "written once, as in a forward without a recorder"
    if found.recording is None:
        assert found.reason.endswith("writes to a parameter in place")
    else:
        assert not any(op.replayable for op in found.recording.ops)


SCALE = 1.0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.fc(x) * SCALE)


def test_a_number_that_dynamo_makes_a_tensor_of_is_not_trusted(monkeypatch):
    """It does so with a global that changes. Nobody sees the function read it: it does not run."""
    compiled, args = torch.compile(Scaled(), backend="aot_eager"), (torch.randn(3, 6, requires_grad=True),)
    for scale in (1.0, 2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        compiled(*args)
    recording = record(compiled, args, {})
    policy = planner.recompute_policy(profile_of(recording))
    run, _ = under(compiled, recording, policy)
    monkeypatch.setitem(globals(), "SCALE", 4.0)
    zoo.assert_exact(compiled, args, {}, run)


class Repeated(nn.Module):
    """Its compiled function has a graph for any number."""

    def forward(self, x):
        return repeated(x, CURRICULUM["times"])


@torch.compile(backend="aot_eager", dynamic=True)
def repeated(x, times):
    return torch.sin(torch.exp(x).repeat(times, 1) * times)


def test_a_call_in_which_a_graph_is_given_another_number_keeps_all(monkeypatch):
    monkeypatch.setitem(CURRICULUM, "times", 3)
    block, args = Repeated(), (torch.randn(3, 6, requires_grad=True),)
    recording = record(block, args, {})
    run, calls = under(block, recording)
    zoo.assert_exact(block, args, {}, run)
    (graph,), (now,) = recording.graphs, graphs_behind(block(*args), 0)
    assert now == graph and 3 in graph.numbers and not calls[-1].diverged
    monkeypatch.setitem(CURRICULUM, "times", 4)
    zoo.assert_exact(block, args, {}, run)
    (other,) = graphs_behind(block(*args), 0)
    assert other.cls is graph.cls and 4 in other.numbers and calls[-1].diverged


def dropout():
    return nn.Sequential(nn.Linear(zoo.WIDTH, zoo.WIDTH), nn.GELU(), nn.Dropout(0.2)), ()


@pytest.mark.parametrize(("make", "backend"), [(gpt, "aot_eager"), (dropout, "inductor")], ids=["gpt", "dropout"])
def test_a_graph_for_any_length_is_replayed_with_the_numbers_that_it_was_given(make, backend):
    compiled = torch.compile(make()[0], backend=backend, dynamic=True)
    for length in (9, 13):
        args = (torch.randn(2, length, zoo.WIDTH, requires_grad=True),)
        recording = record(compiled, args, {})
        ((_, numbers),) = recording.graphs
        assert length in numbers and recording.ops[0].replayable
        run, calls = under(compiled, recording)
        zoo.assert_same_bits(seeded(compiled, args), seeded(compiled, args, run))
        assert not calls[-1].diverged


class Aside(nn.Module):
    """Backward does not lead to one of its two graphs."""

    def __init__(self):
        super().__init__()
        self.kept = torch.compile(nn.Linear(6, 6), backend="aot_eager")
        self.dropped = torch.compile(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), backend="aot_eager")

    def forward(self, x):
        return self.kept(x) + self.dropped(x).detach()


def test_a_graph_that_no_call_can_find_again_is_never_replayed():
    recording = record(Aside(), (torch.randn(3, 6, requires_grad=True),), {})
    refusals = {op.refusal for op in recording.ops if op.is_function}
    assert refusals == {
        "backward of the block's output does not lead to all of its compiled graphs, or leads to others"
    }


def test_what_such_a_graph_saves_is_compressed_when_the_forward_has_ended(monkeypatch):
    block, args = Aside(), (torch.randn(3, 6, requires_grad=True),)
    recording, codec, compressed = record(block, args, {}), make_codec("group", backend="reference", group_size=16), []
    compress = codec.compress
    monkeypatch.setattr(codec, "compress", lambda x: compressed.append(ended[:]) or compress(x))
    chosen = {value.index for value in recording.values if value.index in recording.saved and value.owned}
    stores = tuple("group" if value.index in chosen else "retain" for value in recording.values)
    ended = []
    run, _ = under(block, recording, planner.Policy(stores), dict.fromkeys(chosen, codec))
    block.register_forward_hook(lambda *_: ended.append(True))
    run(*args)
    assert len(compressed) == len(chosen) > 0 and all(compressed)


FACTORS = {"first": 2.0, "second": 2.0}


@torch.compiler.disable
def scaled(x, factor):
    return (x * factor).exp()


def by_itself(x):
    """Dynamo compiles it by itself, without a graph: which number it passes on, only Dynamo knows."""
    return scaled(x, FACTORS["first"] * 2)


class Told(nn.Module):
    """The number is one of the code of Dynamo's that runs the graph before it: of another number, there is another."""

    def forward(self, x):
        return scaled(x.sin(), FACTORS["first"] * 2).cos()


class Untold(nn.Module):
    def forward(self, x):
        return scaled(x, FACTORS["first"] * 2).cos()


class Called(nn.Module):
    def forward(self, x):
        x = x.sin()
        torch._dynamo.graph_break()
        return by_itself(x).cos()


class Masked(nn.Module):
    """A graph that no gradient flows through leaves no node."""

    def forward(self, x):
        with torch.no_grad():
            mask = x > FACTORS["first"]
        return scaled(x, 1.0) * mask


@pytest.mark.matrix
@pytest.mark.parametrize("make", [Told, Untold, Called, Masked])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_runs_beside_graphs_is_replayed_if_a_graph_tells_of_it(make, backend, monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(make(), backend=backend)
    args = (torch.rand(3, 6, requires_grad=True),)
    recording = record(compiled, args, {})
    eager = [op for op in recording.ops if op.short_name in ("mul", "exp")]
    assert eager and all((op.refusal is None) == (make is Told) for op in eager)
    run, calls = under(compiled, recording)
    zoo.assert_exact(compiled, args, {}, run)
    assert not calls[-1].diverged
    monkeypatch.setitem(FACTORS, "first", 0.3)
    zoo.assert_exact(compiled, args, {}, run)
    assert calls[-1].diverged == (make is Told)


class Making(nn.Module):
    """Dynamo's code makes the inner function where the graph breaks. It holds the dict of globals, and has no hash."""

    def __init__(self):
        super().__init__()
        self.factor = 2.0

    def forward(self, x):
        factor = self.factor

        def scale(y):
            return y * factor

        x = scaled(x.sin(), 1.0)
        return scale(x).cos()


def test_a_function_that_is_made_before_a_graph_breaks():
    compiled, args = torch.compile(Making(), backend="aot_eager"), (torch.rand(3, 6, requires_grad=True),)
    recording = record(compiled, args, {})
    assert [op.refusal for op in recording.ops] == [None] * len(recording.ops)
    run, calls = under(compiled, recording)
    zoo.assert_exact(compiled, args, {}, run)
    assert not calls[-1].diverged


class Ahead(nn.Module):
    """A graph of AOTAutograd's without Dynamo, and then code of Dynamo's that runs operators one by one."""

    def __init__(self):
        super().__init__()
        self.graph = aot_function(torch.sin, nop)
        self.graph(torch.rand(3, 6, requires_grad=True))

    def forward(self, x):
        return one_by_one(self.graph(x))


@torch.compile(backend="eager")
def one_by_one(x):
    return (x * by_helper()).exp()


def by_helper():
    return FACTORS["second"]


def test_a_graph_without_dynamo_tells_of_no_operator(monkeypatch):
    block, args = Ahead(), (torch.rand(3, 6, requires_grad=True),)
    block(*args)
    recording = record(block, args, {})
    run, _ = under(block, recording)
    assert [op.refusal for op in recording.ops if op.short_name in ("mul", "exp")] == ["runs compiled"] * 2
    monkeypatch.setitem(FACTORS, "second", 0.3)
    zoo.assert_exact(block, args, {}, run)


class Fusing(nn.Module):
    """Calls a Function that Dynamo must not look into, as those of fused kernels."""

    def forward(self, x):
        return torch.compiler.disable(Plain.apply)(x.sin()).cos()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_function_between_two_graphs_is_one_operator(backend):
    torch._dynamo.reset()
    compiled = torch.compile(Fusing(), backend=backend)
    args = (torch.rand(3, 6, requires_grad=True),)
    recording = record(compiled, args, {})
    assert [(op.short_name, op.refusal) for op in recording.ops] == [
        ("compiled graph", None),
        ("Plain", None),
        ("compiled graph", None),
    ]
    run, calls = under(compiled, recording)
    zoo.assert_exact(compiled, args, {}, run)
    assert not calls[-1].diverged


class Chunked(torch.autograd.Function):
    """Its forward calls a compiled function on parts of its argument, as that of DeepSpeed's FPDT_FFN does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        with torch.no_grad():
            return torch.cat([tanh_compiled(part * 2) for part in x.chunk(2)])

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad * (1 - (2 * x).tanh() ** 2)


@torch.compile(backend="aot_eager")
def tanh_compiled(x):
    return x.tanh()


class CallsChunked(nn.Module):
    def forward(self, x):
        return Chunked.apply(x.sin()).cos()


def test_what_a_function_calls_stays_compiled():
    args = (torch.rand(4, 6, requires_grad=True),)
    recording = record(CallsChunked(), args, {})
    assert [(op.short_name, op.refusal) for op in recording.ops] == [("sin", None), ("Chunked", None), ("cos", None)]
    with torch.profiler.profile() as profiler:
        CallsChunked()(*args)
    assert sum(event.name.startswith("Torch-Compiled Region") for event in profiler.events()) == 2


class Mixed(nn.Module):
    """A compiled function, and operators after it. The other graph of the function saves one tensor more."""

    def forward(self, x):
        return mixed(x).exp().tanh().sigmoid()


@torch.compile(backend="aot_eager")
def mixed(x):
    return torch.sin(torch.cumsum(torch.sin(x), 0)) if CURRICULUM["adds"] else torch.sin(x)


class Headed(nn.Module):
    """What is saved before the graph is rebuilt from what is saved behind it."""

    def forward(self, x):
        doubled = x * 2
        return mixed(doubled.tanh() + 1) + doubled.sin()


@pytest.mark.parametrize(("make", "kept"), [(Mixed, "exp"), (Mixed, "nothing"), (Headed, "mul")])
def test_another_graph_may_save_other_tensors_before_the_operators_that_follow(monkeypatch, make, kept):
    block, args = make(), (torch.randn(3, 5, requires_grad=True),)
    recording = record(block, args, {})
    policy = planner.recompute_policy(profile_of(recording))
    stores = [planner.RETAIN if value.name.startswith(kept) else store for value, store in each(recording, policy)]
    run, calls = under(block, recording, replace(policy, stores=tuple(stores)))
    zoo.assert_exact(block, args, {}, run)
    assert not calls[-1].diverged
    monkeypatch.setitem(CURRICULUM, "adds", True)
    zoo.assert_exact(block, args, {}, run)
    assert calls[-1].diverged


def each(recording, policy):
    return zip(recording.values, policy.stores, strict=True)


class Ending(nn.Module):
    """May end early: what a graph's replay needs is then saved by nobody."""

    ends = False

    def forward(self, x):
        doubled = x * 2
        out = summed(doubled)
        return out if Ending.ends else out + doubled.sin()


@torch.compile(backend="aot_eager")
def summed(x):
    return torch.exp(torch.cumsum(x, 1))


def test_a_call_that_saves_fewer_tensors_keeps_all(monkeypatch):
    block, args = Ending(), (torch.randn(3, 5, requires_grad=True),)
    recording = record(block, args, {})
    policy = planner.recompute_policy(profile_of(recording))
    stores = [planner.RETAIN if value.name == "mul0" else store for value, store in each(recording, policy)]
    run, calls = under(block, recording, replace(policy, stores=tuple(stores)))
    monkeypatch.setattr(Ending, "ends", True)
    zoo.assert_exact(block, args, {}, run)
    assert calls[-1].diverged


class Twice(nn.Module):
    """Two graphs of one function, in either order."""

    def forward(self, x, first):
        return turn(turn(x, first), not first)


@torch.compile(backend="aot_eager")
def turn(x, squares):
    return torch.sin(x * x) if squares else torch.exp(-x.sin())


def test_the_order_of_graphs_counts():
    x = torch.randn(3, 5, requires_grad=True)
    forth, back = (graphs_behind(Twice()(x, first), 0) for first in (True, False))
    assert len(forth) == 2 and back == forth[::-1]


class Prefixed(nn.Module):
    """Saves an empty part of a product beside other parts of it."""

    def __init__(self):
        super().__init__()
        self.product, self.out = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.product(x)
        before, after = hidden[:0], hidden[0:]
        one, other = after.chunk(2, -1)
        return torch.cat([self.out(before[:, :8]), self.out(one) * self.out(other)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_parts(backend):
    check_recomputed(torch.compile(Prefixed(), backend=backend), torch.randn(4, 8, requires_grad=True))


def check_recomputed(block, *args):
    """Where all is recomputed that can be, gradients have the bits of plain autograd."""
    run, _ = under(block, record(block, args, {}))
    zoo.assert_exact(block, args, {}, run)


@torch.library.custom_op("ds_adacc_tests::scaled_dot_product_into", mutates_args=("out",))
def into(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


@into.register_fake
def _(x, out):
    return None


class Writing(nn.Module):
    """Calls an operator that is named like attention, and returns nothing."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        out = torch.empty_like(x)
        torch.ops.ds_adacc_tests.scaled_dot_product_into(x.detach(), out)
        return torch.tanh(self.fc(x)) * out


@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_that_are_like_no_other(backend):
    check_recomputed(torch.compile(Writing(), backend=backend), torch.randn(3, 6, requires_grad=True))


def test_what_torch_compile_generates_is_not_read():
    """Its guards look at all globals of the user's; they decide which graph runs, and that is told by the graphs."""
    generated = {"G": {"held": [object()]}}
    exec("def guard(x): return G['held'] and x.sin()", generated)
    compiled = {"__name__": "torch._dynamo.eval_frame", **generated}
    exec("def compile_wrapper(x): return guard(x)", compiled)
    x = torch.randn(3, requires_grad=True)

    def places_of(block):
        return capture("block", call_of(nn.Identity(), x)._replace(run=functools.partial(block, x))).watch.reads.places

    name = f"None at {id(generated):#x}.G"  # no module has these globals
    assert name in places_of(generated["guard"])
    assert name not in places_of(compiled["compile_wrapper"])
