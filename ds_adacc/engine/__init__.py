"""What ties ds_adacc to a DeepSpeed engine.

In comes a model or an engine with an "adacc" section in its ds_config; out goes the engine, with its blocks wrapped and
`engine.adacc` set.

* `api`: `initialize` and `attach`; `adacc`: what `engine.adacc` is;
* `hooks`: every method of the engine that is patched, in one list;
* `zero3`: blocks as ZeRO-3 leaf modules; `pipeline`: what is particular to pipelines;
* `checkpoint`: saves and restores the plan with the engine's checkpoints; `checkpoint_file`: the file;
* `gradient_checkpointing`: turns off that of Hugging Face models, whose layers would be recomputed twice;
* `patch`: `deepspeed.initialize` becomes `ds_adacc.initialize`, for scripts that are not changed.
"""
