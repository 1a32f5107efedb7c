"""CUDA graphs of engines whose modules can move: pieces of the uncompiled model.

vLLM's compiled code holds the modules that it was compiled from. With ``GRAPHS_VARIABLE`` vLLM
compiles nothing and captures the uncompiled model, with a break at each attention.
"""

from __future__ import annotations

import os
from argparse import Namespace

from banaserve.contracts.environment import GRAPHS_VARIABLE
from banaserve.engine.compat.config import CompilationMode, CUDAGraphMode, VllmConfig, is_on_cpu


def choose_graphs(args: Namespace) -> bool:
    """Return whether engines need ``GRAPHS_VARIABLE`` for their modules to move.

    False if the user has set it, or asked for --enforce-eager, full graphs or compiled code.
    """
    asked = args.compilation_config
    return (
        not is_on_cpu()
        and GRAPHS_VARIABLE not in os.environ
        and not args.enforce_eager
        and asked.mode in (None, CompilationMode.NONE)
        and asked.cudagraph_mode in (None, CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE)
    )


def break_at_attention(args: Namespace) -> None:
    """Let engines with ``GRAPHS_VARIABLE`` capture no step as a whole: its attentions may change.

    Without a store vLLM would do so for steps that decode.
    """
    is_asked = args.enforce_eager or args.compilation_config.cudagraph_mode is not None
    if os.environ.get(GRAPHS_VARIABLE) == "1" and not is_asked and not is_on_cpu():
        args.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


def graph_words(config: VllmConfig) -> str:
    """Return the banner's text on the graphs of engines on a GPU whose modules can move."""
    if config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE:
        return "no CUDA graphs, as asked"
    return "piecewise CUDA graphs of the uncompiled model (--migration off compiles it)"
