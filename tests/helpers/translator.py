"""A model with blocks in several containers, and lists that hold none."""

import zoo
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(4))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


class Translator(nn.Module):
    """An encoder, a decoder with experts inside its layers, a list of embeddings and a list of heads."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(8, 4) for _ in range(3))
        self.encoder = nn.Sequential(*(zoo.BertBlock() for _ in range(2)), nn.LayerNorm(4))
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(3))})
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
