"""The server, over the engine: `python -m sglang.launch_server`."""

import argparse
import json
from pathlib import Path

import torch
from aiohttp import web
from safetensors import safe_open

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import RECORD, CheckWeightsReqInput


def options():
    parser = argparse.ArgumentParser()
    for name in RECORD["options"]:
        word = f"--{name.replace('_', '-')}"
        if name.startswith(("enable", "skip")):
            parser.add_argument(word, action="store_true")
        else:
            parser.add_argument(word)
    return parser.parse_args()


def routes(engine, given):
    table, manager = web.RouteTableDef(), engine.tokenizer_manager
    config = json.loads((engine.folder / "config.json").read_text())

    @table.get("/health")
    async def health(_):
        return web.Response()

    @table.get("/model_info")
    async def model_info(_):
        found = {"model_path": str(engine.folder), "is_generation": True, "architectures": config["architectures"]}
        return web.json_response(found | {"preferred_sampling_params": None, "weight_version": manager.version})

    @table.get("/server_info")
    async def server_info(_):
        found = {"dtype": given.dtype, "context_length": int(given.context_length), "version": "0.5.23"}
        found |= {"json_model_override_args": given.json_model_override_args}
        switches = ("enable_deterministic_inference", "enable_fp32_lm_head")
        return web.json_response(found | {name: getattr(given, name) for name in switches})

    @table.post("/generate")
    async def generate(request):
        return web.json_response(await engine.async_generate(**await request.json(), rid="of the server"))

    @table.post("/update_weights_from_disk")
    async def update(request):
        body = await request.json()
        assert body.keys() <= set(RECORD["fields"]["UpdateWeightFromDiskReqInput"])
        folder, own = Path(body["model_path"]), dict(engine.model.named_parameters())
        for name, file in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].items():
            with safe_open(folder / file, "pt") as opened, torch.no_grad():
                own[name].copy_(opened.get_tensor(name))
        manager.version = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    @table.post("/flush_cache")
    async def flush(_):
        return web.Response()

    @table.post("/weights_checker")
    async def check(request):
        *_, checksum = await manager.check_weights(CheckWeightsReqInput(**await request.json()))
        return web.json_response({"success": True, "per_engine_checksum": checksum})

    return table


if __name__ == "__main__":
    given = options()
    engine = Engine(
        model_path=given.model_path, dtype=given.dtype, enable_deterministic_inference=True, skip_tokenizer_init=True
    )
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(routes(engine, given))
    web.run_app(app, host=given.host, port=int(given.port), print=None)
