"""Converts a checkpoint of make_checkpoint.py for llama.cpp, with its own converter.

    .venv/bin/python benchmarks/convert_gguf.py LLAMA_CPP_SOURCE CHECKPOINT OUT.gguf TYPE

TYPE is bf16, or q8_0: int8 with a scale for every 32 elements. The converter knows tokenizers by a hash, which ours does
not have: it is told the name. Of DeepSeek-V3 it drops the MTP layer; the same network under the name of GLM-4.7-Flash is
converted with it.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Runs the converter in this process."""
    source, checkpoint, output, kind = sys.argv[1:]
    sys.path[:0] = [str(Path(source) / "gguf-py"), source]
    import convert_hf_to_gguf
    from conversion import deepseek, glm  # noqa: F401  (registers its own classes first)
    from conversion.base import ModelBase, TextModel

    ModelBase.register("DeepseekV3ForCausalLM")(glm.Glm4MoeLiteModel)
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outtype", kind, "--outfile", output]
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
