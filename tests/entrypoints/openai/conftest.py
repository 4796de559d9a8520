"""What all tests of the HTTP layer share: one tiny checkpoint and vLLM's configuration of it."""

from __future__ import annotations

import pytest

from tests.entrypoints.openai.http_rig import MODEL, TextParts
from tests.tiny_models import make_tiny_llama


@pytest.fixture(scope="session")
def text_parts(tmp_path_factory: pytest.TempPathFactory) -> TextParts:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_omni.engine.ar_preparer import ArPreparer

    model_dir = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    words = ["--model", str(model_dir), "--served-model-name", MODEL, "--dtype", "float32"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*words, "--max-model-len", "256"])
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    return TextParts(args, ArPreparer("thinker", config))
