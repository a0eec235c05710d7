"""DeepSeek and GLM models with their multi-token-prediction modules: engine and Triton backend.

from mtp_backend import LLM, SamplingParams

llm = LLM("checkpoints/deepseek-demo", speculative={"method": "mtp", "num_speculative_tokens": 2})
print(llm.generate("In the beginning", SamplingParams(max_tokens=32))[0].text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mtp_backend.sampling import SamplingParams

if TYPE_CHECKING:
    from mtp_backend.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # The processes of the inference server use this package without the tensor library.
    if name == "LLM":
        from mtp_backend.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
