"""The cases of PyTorch's tests of nested and selective checkpoints (pytorch/pytorch, test/test_autograd.py,
TestNestedCheckpoint and TestSelectiveActivationCheckpoint). An inner checkpoint only calls its function: the plan of
the outer one chooses among all tensors, which is what nesting and selecting are for."""

import collections
import weakref

import pytest
import torch


def gradient_of(function):
    def wrapped(x):
        with torch.enable_grad():
            return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]

    return wrapped


def chain(x):
    return x.sin().exp().sin()


def with_gradients_inside(x):
    torch.autograd.grad(x.sin().exp().sin(), x)
    torch.autograd.grad(x.cos().exp().sin(), x)
    return x.sin()


def checkpointed(call):
    def wrap(function):
        def wrapped(*args):
            return call(function, *args)

        return wrapped

    return wrap


g = gradient_of
NESTINGS = {
    "twice": lambda f, c: c(c(f)),
    "gradient of twice": lambda f, c: g(c(c(f))),
    "checkpointed gradient": lambda f, c: c(g(c(f))),
    "alternating": lambda f, c: g(c(g(c(f)))),
}


@pytest.mark.matrix
@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("function", [chain, with_gradients_inside])
def test_nested_checkpoints_and_gradients(peer, function, nesting):
    x = torch.randn((), requires_grad=True)

    def case(call):
        output = NESTINGS[nesting](function, checkpointed(call))(x)
        return output, torch.autograd.grad(output, x, allow_unused=True) if output.requires_grad else ()

    peer.compare(case, quiet=False)  # a gradient inside a block reads saved tensors in forward: some are retained


def test_two_checkpoints_in_one(peer):
    x = torch.randn(3, 3, requires_grad=True)

    def case(call):
        c = checkpointed(call)
        inner = c(lambda x: c(lambda x: x.cos().sin().exp())(c(chain)(x)))
        return g(g(inner))(x), g(c(g(inner)))(x)

    peer.compare(case, quiet=False)


def nodes_of(root):
    seen, queue = {root}, collections.deque([root])
    while queue:
        node = queue.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)


class Mark:
    pass


def test_the_graph_dies_with_its_output(peer, uncollected):
    def marked(call):
        x = torch.randn((), requires_grad=True)
        c = checkpointed(call)
        output = g(c(g(c(chain))))(x)
        marks = []
        for node in nodes_of(output.grad_fn):
            mark = node.metadata["mark"] = Mark()
            marks.append(weakref.ref(mark))
        return marks

    def case(call):
        marks = marked(call)
        return len(marks) > 3, sum(mark() is not None for mark in marks)

    peer.compare(case, quiet=False)


def test_functions_numbers_and_words_among_the_arguments(peer):
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)

    def forward(number, a, b, function):
        return function(number * a * b.exp()), 1, "abcd"

    peer.compare(lambda call: torch.autograd.grad(call(forward, 3, a, b, torch.sin)[0], [a, b]))


def test_a_keyword_argument_gets_a_gradient(peer):
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)

    def forward(a, factor=None):
        return (a.sin().exp() * factor).sin().exp()

    peer.compare(lambda call: torch.autograd.grad(call(forward, a, factor=b), [a, b]))


def test_the_graph_is_the_plain_one(peer):
    """A hook on a node inside the block runs, once."""
    a = torch.tensor(1.0, requires_grad=True)

    def case(call):
        ran = []
        output = call(lambda a: a.sin().cos().sin(), a)
        output.grad_fn.next_functions[0][0].register_hook(lambda *_: ran.append(0))
        names = [node.name() for node in nodes_of(output.grad_fn)]
        a.grad = None
        output.backward()
        return names, len(ran), a.grad

    peer.compare(case)


def test_a_backward_within_a_backward(peer):
    a = torch.tensor(1.0, requires_grad=True)

    def forward(a):
        x = a.sin().cos()
        return x, x.sin()

    def case(call):
        a.grad = None
        x, output = call(forward, a)
        output.grad_fn.register_hook(lambda *_: x.backward(retain_graph=True))
        output.backward(retain_graph=True)
        return a.grad

    peer.compare(case)


# -- selective


def test_a_view_of_what_has_no_gradient_is_an_output(peer):
    numbers, y = torch.tensor([1, 2, 3]), torch.randn(3, requires_grad=True)
    peer.compare(
        lambda call: torch.autograd.grad(call(lambda x, y: (x.view(-1), y.sin().cos()), numbers, y)[1].sum(), y)
    )


def test_what_is_saved_is_written_to_later(peer):
    """PyTorch raises an error if the policy saves it, for it would be wrong; here the value before is rebuilt."""
    x = torch.randn(3, requires_grad=True)
    peer.compare(lambda call: torch.autograd.grad(call(lambda x: x.sin().mul_(2).cos().exp(), x).sum(), x))


def test_what_is_returned_is_written_to_outside(peer):
    x = torch.randn(3, requires_grad=True)

    def case(call):
        output = call(lambda x: x.sin().cos() * 2, x)
        return torch.autograd.grad(output.mul_(3).exp().sum(), x)

    peer.compare(case)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.std_mean(x.sin()), lambda x: torch.topk(x.sin(), 2), lambda x: x.sin().exp().unbind()],
    ids=["two values", "values and indices", "a list of views"],
)
def test_operators_of_several_outputs(peer, function):
    x = torch.randn(4, requires_grad=True)

    def case(call):
        outputs = call(lambda x: [part.exp() for part in function(x) if part.is_floating_point()], x)
        outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return torch.autograd.grad(sum(output.sum() for output in outputs), x)

    peer.compare(case)


def test_an_operator_whose_output_is_no_tensor(peer):
    x = torch.randn(3, requires_grad=True)

    def forward(x):
        y = x.sin()
        return y.exp() * float(y.shape[0]) if torch.ops.aten.is_same_size(y, x) else y

    peer.compare(lambda call: torch.autograd.grad(call(forward, x).sum(), x))


def test_a_number_is_read_from_data(peer):
    """What follows it is not replayed, for the number is another one in each batch."""

    def forward(x):
        return (x.sin() * x.sum().item()).exp()

    def case(call):
        x = torch.randn(3, requires_grad=True)
        return torch.autograd.grad(call(forward, x).sum(), x), torch.autograd.grad(call(forward, x + 1).sum(), x)

    peer.compare(case)
