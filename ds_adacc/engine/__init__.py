"""Connects ds_adacc to a DeepSpeed engine.

The input is a model or an engine with an "adacc" section in its ds_config. The output is the engine, with its blocks
wrapped and `engine.adacc` set.

* `api`: `initialize` and `attach`; `serving`: has a runtime serve the engine's blocks; `adacc`: the class of
  `engine.adacc`;
* `planning_ranks`: which ranks plan together; refuses them if their sections differ;
* `engine_methods`: the list of all methods of the engine that ds_adacc patches;
* `zero3`: makes blocks ZeRO-3 leaf modules; `pipeline`: functions for DeepSpeed's pipelines only;
* `save_load`: saves and restores the plan with the engine's checkpoints; `state_file`: its file format;
* `monitor`: events for DeepSpeed's monitor;
* `gradient_checkpointing`: replaces the checkpointing of Hugging Face models, so that no layer is recomputed twice;
* `patch_initialize`: replaces `deepspeed.initialize` by `ds_adacc.initialize`, for scripts that are not changed;
  `patch_checkpointing`: does so with functions of `deepspeed.checkpointing`.
"""
