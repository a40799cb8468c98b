"""The roles of the tensors that a compiled graph saves."""

import torch

from ds_adacc.record.naming.roles_inside import RolesInside

A = torch.ops.aten


def test_a_product_gives_its_input_a_role_and_neither_its_weight_nor_its_bias():
    roles, bias, x, weight = RolesInside(), torch.randn(4), torch.randn(2, 3), torch.randn(3, 4)
    other, factor = torch.randn(2, 3), torch.randn(3, 4)
    roles.note(A.addmm.default, (bias, x, weight), (A.addmm(bias, x, weight),))
    roles.note(A.mm.default, (other, factor), (A.mm(other, factor),))
    assert [roles.of(each) for each in (bias, x, weight, other, factor)] == [None, "linear", None, "linear", None]


def test_a_tensor_in_several_roles_has_the_strongest():
    roles, x, weight = RolesInside(), torch.randn(2, 3), torch.randn(3)
    y, mean, rstd = A.native_layer_norm(x, [3], weight, None, 1e-5)
    roles.note(A.native_layer_norm.default, (x, [3], weight, None, 1e-5), (y, mean, rstd))
    roles.note(A.gelu.default, (y,), (A.gelu(y),))
    scores = torch.randn(2, 3)
    roles.note(A._softmax.default, (scores, -1, False), (A._softmax(scores, -1, False),))
    each = {"x": x, "weight": weight, "y": y, "mean": mean, "rstd": rstd, "scores": scores}
    expected = {"x": "layernorm", "weight": None, "y": "layernorm", "mean": "statistic", "rstd": "statistic"}
    assert {name: roles.of(tensor) for name, tensor in each.items()} == {**expected, "scores": None}
