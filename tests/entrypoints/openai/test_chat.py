from __future__ import annotations

from tests.entrypoints.openai.http_rig import TextParts, serving
import time

async def test_x(text_parts):
    for i in range(3):
        t=time.time()
        async with serving(text_parts) as rig:
            print("build",time.time()-t)
            r=await rig.chat(); print(r.text)
            r=await rig.chat(modalities=["text","audio"]); print(r.text[:700])
            for e in await rig.events(modalities=["text","audio"]): print(str(e)[:300])
            r=await rig.chat(n=2,modalities=["text","audio"]); print(r.text[:700])
