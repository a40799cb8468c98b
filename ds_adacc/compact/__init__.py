"""CompAct: Linear layers that save a random projection of their input, and train in the compressed space.

After Shamshoum et al., *CompAct: Compressed Activations for Memory-Efficient LLM Training* (NAACL 2025). The input is a
model and the section's `compact`; the output is the same model, in which some Linear layers are `CompactLinear`. Of
each, the weight W is frozen, and a proxy parameter D takes its place in the engine's optimizer. So gradients,
optimizer states, accumulation, clipping, master weights, partitions and offload are DeepSpeed's own, of fewer elements.

* `projection`: the random projection, drawn by whole numbers, and the products with it;
* `linear`: the layer, its forward and backward, its state dict;
* `shared`: one projection for the layers that read one tensor;
* `choice`: which layers are served, and why the others are not;
* `optimized`: puts D in the place of W among the parameters to train, and reads the rates of its group;
* `boundary`: after an optimizer step adds the update to W and sets D to zero, on every ZeRO stage;
* `rounding`: stochastic rounding, for weights in bf16 and fp16;
* `compact`: the object that owns the served layers of an engine, and the seed of their projections;
* `seed_file`: saves and restores that seed.
"""
