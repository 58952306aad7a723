"""The engine. A file `fault` in the model's folder says what it does wrong."""

import asyncio
import hashlib
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from types import SimpleNamespace

from sglang.srt.managers.io_struct import RECORD


class Engine:
    def __init__(self, **kwargs):
        assert kwargs.keys() <= set(RECORD["options"]), kwargs
        assert kwargs["enable_deterministic_inference"] and kwargs["skip_tokenizer_init"]
        self.folder = Path(kwargs["model_path"])
        if not self.folder.is_dir():
            raise ValueError(f"no model in {self.folder}")
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=getattr(torch, kwargs["dtype"])).eval()
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = Manager(self)
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])  # its scheduler
        (self.folder / "scheduler").write_text(str(self.child.pid))

    def fault(self):
        file = self.folder / "fault"
        return file.read_text() if file.is_file() else ""

    async def async_generate(self, *, input_ids, sampling_params, return_logprob, rid, **others):
        import torch

        assert return_logprob and others.keys() <= {"logprob_start_len", "top_logprobs_num", "stream"}
        assert sampling_params.keys() <= set(RECORD["fields"]["SamplingParams"])
        fault = self.fault()
        if fault == "dies":
            os.kill(os.getpid(), 9)
        if fault == "hangs":
            self.tokenizer_manager.requests[rid] = asyncio.get_running_loop().create_future()
            await self.tokenizer_manager.requests[rid]
        greedy = sampling_params["temperature"] == 0.0
        generator = torch.Generator().manual_seed(sampling_params.get("sampling_seed", 0))
        ids, entries, reason = list(input_ids), [], {"type": "length", "length": sampling_params["max_new_tokens"]}
        for _ in range(sampling_params["max_new_tokens"]):
            with torch.no_grad():
                logits = self.model(torch.tensor([ids])).logits[0, -1].float()
            log_probs = (logits / (1.0 if greedy else sampling_params["temperature"])).log_softmax(-1)
            drawn = log_probs.argmax() if greedy else torch.multinomial(log_probs.exp(), 1, generator=generator)[0]
            ids.append(int(drawn))
            entries.append((float(log_probs[drawn]), int(drawn), None))
            if ids[-1] in sampling_params["stop_token_ids"]:
                reason = {"type": "stop", "matched": ids[-1]}
                break
        info = {"id": rid, "finish_reason": reason, "output_token_logprobs": entries}
        info["weight_version"] = self.tokenizer_manager.version
        return {"output_ids": ids[len(input_ids) :], "meta_info": info}

    def shutdown(self):
        self.child.kill()
        self.child.wait()


class Manager:
    def __init__(self, engine):
        self.engine = engine
        self.session = False
        self.version = "default"
        self.released = []
        self.requests = {}

    def abort_request(self, rid="", abort_all=False):
        for name in list(self.requests):
            if name.startswith(rid):
                self.requests.pop(name).cancel()
                with (self.engine.folder / "withdrawn").open("a") as file:
                    file.write(f"{name}\n")

    async def begin_weight_update(self, obj, request=None):
        if self.session:
            return False, "a weight-update session is already open"
        self.session = True
        return True, "Success"

    async def end_weight_update(self, obj, request=None):
        was, self.session = self.session, False
        return was, "Success" if was else "no weight-update session is open"

    async def update_weights_from_tensor(self, obj, request=None):
        import torch

        if not self.session:
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        assert obj.load_format == "flattened_bucket" and obj.flush_cache is False
        (parts,), start = obj.serialized_named_tensors, 0
        own = dict(self.engine.model.named_parameters())
        for name, dtype, shape in parts["metadata"]:
            count = prod(shape) * dtype.itemsize
            tensor = parts["flattened_tensor"][start : start + count].view(dtype).view(shape)
            start += count
            if self.engine.fault() == "refuses" or name not in own:
                return False, f"no parameter {name}"
            if self.engine.fault() != "forgets":
                with torch.no_grad():
                    own[name].copy_(tensor)
        self.version = obj.weight_version
        return True, "Success"

    async def flush_cache(self, timeout_s=None):
        return SimpleNamespace(success=self.engine.fault() != "keeps its cache", message="")

    async def check_weights(self, obj, request=None):
        import torch

        assert obj.action == "checksum"
        whole = hashlib.sha256()
        for name, tensor in sorted(self.engine.model.named_parameters()):
            whole.update(name.encode() + tensor.detach().view(torch.uint8).numpy().tobytes())
        return True, "Success.", [], whole.hexdigest()

    async def release_memory_occupation(self, obj, request=None):
        self.released += obj.tags

    async def resume_memory_occupation(self, obj, request=None):
        for tag in obj.tags:
            self.released.remove(tag)
