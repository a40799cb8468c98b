"""CompAct in plain torch, with P as a matrix: what the engine's weights are compared with, step by step."""

from __future__ import annotations

import torch

from ds_adacc.compact.projection import draw


def matrix(seed, name, epoch, features, rank):
    """P (n × r), its signs counted digit by digit."""
    rows, columns = (drawn.tolist() for drawn in draw(seed, name, epoch, features, rank))
    signs = [[1 - 2 * ((i & j).bit_count() % 2) for j in columns] for i in rows]
    return torch.tensor(signs, dtype=torch.float32) * rank**-0.5


class Reference:
    """AdamW on the gradients of `model`, in the compressed space for the weights of `ranks` (by a layer's name)."""

    def __init__(self, model, ranks, seed, interval, scale, decay, clip):
        self.model, self.ranks, self.seed, self.interval = model, ranks, seed, interval
        self.scale, self.decay, self.clip = scale, decay, clip
        self.step_count, self.moments = 0, {}

    @torch.no_grad()
    def step(self, rate):
        """One optimizer step with the `.grad` of all parameters, at this learning rate."""
        projections = {}
        for name, rank in self.ranks.items():
            features, epoch = self.model.get_submodule(name).in_features, self.step_count // self.interval
            projections[f"{name}.weight"] = matrix(self.seed, name, epoch, features, rank)
        self.step_count += 1
        gradients = {
            name: parameter.grad @ projections[name] if name in projections else parameter.grad
            for name, parameter in self.model.named_parameters()
        }
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        factor = min(1.0, self.clip / (norm.item() + 1e-6))
        for name, parameter in self.model.named_parameters():
            update = self._adam(name, factor * gradients[name])
            if name in projections:
                update = self.scale * update @ projections[name].T
            parameter.mul_(1 - rate * self.decay).sub_(rate * update)

    def _adam(self, name, gradient, betas=(0.9, 0.999), epsilon=1e-8):
        zeros = torch.zeros_like(gradient)
        first, second = self.moments.get(name, (zeros, zeros))
        first, second = betas[0] * first + (1 - betas[0]) * gradient, betas[1] * second + (1 - betas[1]) * gradient**2
        self.moments[name] = first, second
        unbiased = first / (1 - betas[0] ** self.step_count), second / (1 - betas[1] ** self.step_count)
        return unbiased[0] / (unbiased[1].sqrt() + epsilon)


def whole_batch_gradients(model, batches):
    """Leave the mean gradient of these micro-batches, of all ranks, in `.grad`."""
    model.zero_grad()
    for tokens in batches:
        (model(tokens) / len(batches)).backward()
