"""The source tree keeps what the checks promise; each check fails on a tree that does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tools.architecture.allowed import OWNED_WAITS
from tools.architecture.boundaries import broad_excepts, stale_boundaries
from tools.architecture.checks import CHECKS
from tools.architecture.endless_waits import endless_waits, stale_owners

ROOT: Final = Path(__file__).parents[2]
Tree = Callable[[dict[str, str]], Path]

_DOCSTRING: Final = '    """Says.\n\n    Much.\n    """\n'
_DOCUMENTED_FUNCTION: Final = f"def f() -> None:\n{_DOCSTRING}" + "    g()\n" * 59
_LONG_FUNCTION: Final = "def f() -> None:\n" + "    print()\n" * 60
_MODEL: Final = {"vllm_omni/model_executor/models/singer/pipeline.py": ""}

BROKEN: Final[list[tuple[str, dict[str, str], str]]] = [
    (
        "layers",
        {
            "vllm_omni/engine/pool.py": "",
            "vllm_omni/config/x.py": "def f():\n    from vllm_omni.engine import pool\n",
        },
        "vllm_omni/config/x.py:2 imports upward: engine.pool",
    ),
    (
        "layers",
        {
            "vllm_omni/core/x.py": "from ..engine.bridge import A\nfrom ..engine import pool",
            "vllm_omni/engine/bridge.py": "",
            "vllm_omni/engine/pool.py": "",
        },
        "vllm_omni/core/x.py:2 imports upward: engine.pool",
    ),
    ("layers", {"vllm_omni/newroom/x.py": ""}, "vllm_omni/newroom/x.py: its room is in no layer"),
    (
        "cycles",
        {
            "vllm_omni/engine/a.py": "import vllm_omni.engine.b\n",
            "vllm_omni/engine/b.py": "try:\n    from vllm_omni.engine.a import x\nfinally: ...\n",
        },
        "modules import each other in a circle: engine.a, engine.b",
    ),
    (
        "model-names",
        {**_MODEL, "vllm_omni/engine/x.py": "if family == 'singer': ...\n"},
        "vllm_omni/engine/x.py:1 names a model (singer)",
    ),
    (
        "model-names",
        {**_MODEL, "vllm_omni/deploy/other.yaml": "model: singer\n"},
        "vllm_omni/deploy/other.yaml:1 names a model (singer)",
    ),
    (
        "model-names",
        {**_MODEL, "vllm_omni/config/registry.py": 'if x == "singer": pass\n'},
        "vllm_omni/config/registry.py:1 names a model (singer)",
    ),
    (
        "model-names",
        {"vllm_omni/worker/qwen_runner.py": ""},
        "vllm_omni/worker/qwen_runner.py: its path names a model (qwen)",
    ),
    ("sizes", {"vllm_omni/x.py": "\n" * 401}, "vllm_omni/x.py: 401 lines, at most 400"),
    ("sizes", {"examples/x.py": "\n" * 81}, "examples/x.py: 81 lines, at most 80"),
    ("sizes", {"tests/x.py": "\n" * 501}, "tests/x.py: 501 lines, at most 500"),
    ("sizes", {"tests/x.py": _LONG_FUNCTION}, "tests/x.py:1 f: 61 lines, at most 60"),
    (
        "broad-excepts",
        {"vllm_omni/x.py": "class A:\n  def f(self):\n    try: ...\n    except Exception: ...\n"},
        "vllm_omni/x.py:4 broad except in A.f",
    ),
    (
        "broad-excepts",
        {"vllm_omni/x.py": "with contextlib.suppress(ValueError, BaseException): ...\n"},
        "vllm_omni/x.py:1 broad except in the module",
    ),
    (
        "device-calls",
        {"vllm_omni/worker/x.py": "import torch\ntorch.cuda.synchronize()\n"},
        "vllm_omni/worker/x.py:2 uses torch.cuda",
    ),
    (
        "device-calls",
        {"vllm_omni/worker/x.py": "from torch.cuda import Event\n"},
        "vllm_omni/worker/x.py:1 uses torch.cuda.Event",
    ),
    ("pickling", {"vllm_omni/x.py": "import pickle\n"}, "vllm_omni/x.py:1 uses pickle"),
    ("pickling", {"vllm_omni/x.py": "s.recv_pyobj()\n"}, "vllm_omni/x.py:1 uses s.recv_pyobj"),
    ("pickling", {"vllm_omni/x.py": "torch.load(p)\n"}, "vllm_omni/x.py:1 uses torch.load"),
    ("sleeps", {"vllm_omni/x.py": "import time\ntime.sleep(x)\n"}, "vllm_omni/x.py:2 sleeps"),
    (
        "sleeps",
        {"vllm_omni/engine/x.py": "await asyncio.sleep(0.01)\n"},
        "x.py:1 sleeps for",
    ),
    (
        "timed-polls",
        {"vllm_omni/engine/x.py": "while True:\n    if sock.poll(100): ...\n"},
        "vllm_omni/engine/x.py:2 polls: sock.poll",
    ),
    (
        "timed-polls",
        {"vllm_omni/core/x.py": "while a:\n    q.get(timeout=0.1)\n"},
        "vllm_omni/core/x.py:2 polls: q.get",
    ),
    *(
        (
            "endless-waits",
            {f"vllm_omni/{room}/x.py": f"class A:\n  async def f(self):\n    {wait}\n"},
            f"x.py:3 waits for ever in A.f:{what}",
        )
        for room, wait, what in (
            ("engine", "await self.event.wait()", "self.event.wait"),
            ("engine", "return await queue.async_q.get()", "queue.async_q.get"),
            ("engine", "x = await self.answer", "self.answer"),
            ("engine", "await asyncio.wait({died})", "asyncio.wait"),
            ("engine", "await asyncio.wait_for(x, None)", "asyncio.wait_for"),
            ("distributed", "parts = self.socket.recv_multipart()", "self.socket.recv_multipart"),
            ("distributed", "self.thread.join()", "self.thread.join"),
            ("distributed", "self.poller.poll(None)", "self.poller.poll"),
        )
    ),
    (
        "unbounded-queues",
        {"vllm_omni/x.py": "q = asyncio.Queue()\n"},
        "vllm_omni/x.py:1 asyncio.Queue without a bound",
    ),
    (
        "unbounded-queues",
        {"vllm_omni/x.py": "q = janus.Queue(maxsize=0)\n"},
        "vllm_omni/x.py:1 janus.Queue without a bound",
    ),
]

FINE: Final[list[tuple[str, dict[str, str]]]] = [
    (
        "layers",
        {
            "vllm_omni/__init__.py": "from vllm_omni.engine import pool\n",
            "vllm_omni/engine/pool.py": "from vllm_omni.config import x\n",
            "vllm_omni/engine/messages.py": "",
            "vllm_omni/core/x.py": "from vllm_omni.engine.messages import M\n",
            "vllm_omni/config/x.py": "",
        },
    ),
    (
        "cycles",
        {
            "vllm_omni/engine/a.py": "import vllm_omni.engine.b\n",
            "vllm_omni/engine/b.py": "def f():\n    from vllm_omni.engine.a import x\n",
        },
    ),
    (
        "model-names",
        {
            **_MODEL,
            "vllm_omni/deploy/singer.yaml": "# singer\n",
            "vllm_omni/model_executor/models/singer/net.py": "class Singer: ...\n",
            "vllm_omni/config/registry.py": (
                'X = {\n    "singer": "vllm_omni.model_executor.models.singer.pipeline:P",\n}\n'
            ),
        },
    ),
    ("sizes", {"vllm_omni/x.py": "\n" * 400, "tests/x.py": "\n" * 500}),
    ("sizes", {"vllm_omni/x.py": _DOCUMENTED_FUNCTION}),
    ("broad-excepts", {"vllm_omni/x.py": "try: ...\nexcept BaseException:\n    f()\n    raise\n"}),
    ("device-calls", {"vllm_omni/platforms/cuda.py": "torch.cuda.synchronize()\n"}),
    ("pickling", {"vllm_omni/x.py": "torch.load(p, weights_only=True)\n"}),
    ("sleeps", {"vllm_omni/engine/x.py": "asyncio.sleep(backoff_s)\nasyncio.sleep(0)\n"}),
    ("timed-polls", {"vllm_omni/engine/x.py": "while a:\n    sock.poll(None)\n    d.get(1)\n"}),
    (
        "endless-waits",
        {
            "vllm_omni/engine/x.py": (
                "async def f():\n"
                "  async with asyncio.timeout(5):\n    await event.wait()\n"
                "  await asyncio.wait({a}, timeout=timeout_s)\n"
                "  await asyncio.wait_for(event.wait(), 5)\n"
                "  await other()\n  socket.recv(1, zmq.NOBLOCK)\n  thread.join(2.0)\n"
                "  poller.poll(self._wait_ms())\n  ', '.join(names)\n"
            ),
            "vllm_omni/entrypoints/x.py": "async def f():\n  await event.wait()\n",
        },
    ),
    ("unbounded-queues", {"vllm_omni/x.py": "q = janus.Queue(64)\nr = queue.Queue(maxsize=n)\n"}),
]


@pytest.mark.parametrize("name", CHECKS)
def test_the_tree_keeps_its_promise(name: str) -> None:
    assert CHECKS[name](ROOT) == []


@pytest.mark.parametrize(("name", "files", "complaint"), BROKEN)
def test_a_broken_promise_is_found(
    name: str, files: dict[str, str], complaint: str, tree: Tree
) -> None:
    complaints = CHECKS[name](tree(files))

    assert len(complaints) == 1, complaints
    assert complaint in complaints[0]


@pytest.mark.parametrize(("name", "files"), FINE)
def test_what_is_allowed_is_not_reported(name: str, files: dict[str, str], tree: Tree) -> None:
    assert CHECKS[name](tree(files)) == []


def test_every_check_has_a_tree_that_it_refuses() -> None:
    assert {name for name, _, _ in BROKEN} == set(CHECKS)


def test_no_listed_boundary_is_gone() -> None:
    assert stale_boundaries(ROOT) == []


def test_every_listed_wait_is_in_the_code_and_names_who_ends_it() -> None:
    assert stale_owners(ROOT) == []
    assert all(owner for owner in OWNED_WAITS.values())


def test_a_listed_wait_is_allowed_until_it_is_gone(tree: Tree) -> None:
    root = tree({"vllm_omni/engine/x.py": "async def f():\n  await event.wait()\n"})
    owned = {"vllm_omni/engine/x.py:f:event.wait": "me", "vllm_omni/engine/x.py:g:y": "nobody"}

    assert endless_waits(root, owned) == []
    assert stale_owners(root, owned) == [
        "vllm_omni/engine/x.py:g:y: listed in OWNED_WAITS, not in the code"
    ]


def test_a_listed_boundary_is_allowed_until_it_is_gone(tree: Tree) -> None:
    root = tree({"vllm_omni/x.py": "def f():\n    try: ...\n    except Exception: ...\n"})
    listed = {"vllm_omni/x.py:f", "vllm_omni/x.py:g"}

    assert broad_excepts(root, listed) == []
    assert stale_boundaries(root, listed) == [
        "vllm_omni/x.py:g: listed in BROAD_EXCEPTS, not in the code"
    ]
