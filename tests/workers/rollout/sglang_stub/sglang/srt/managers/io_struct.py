"""Requests, by the fields that the released source has."""

import json
from pathlib import Path
from types import SimpleNamespace

RECORD = json.loads((Path(__file__).parents[6] / "contracts" / "sglang.json").read_text())


def _request(name):
    fields = RECORD["fields"][name]

    def made(**given):
        assert given.keys() <= set(fields), (name, given.keys())
        return SimpleNamespace(**(dict.fromkeys(fields) | given))

    return made


BeginWeightUpdateReqInput = _request("BeginWeightUpdateReqInput")
EndWeightUpdateReqInput = _request("EndWeightUpdateReqInput")
UpdateWeightsFromTensorReqInput = _request("UpdateWeightsFromTensorReqInput")
ReleaseMemoryOccupationReqInput = _request("ReleaseMemoryOccupationReqInput")
ResumeMemoryOccupationReqInput = _request("ResumeMemoryOccupationReqInput")
CheckWeightsReqInput = _request("CheckWeightsReqInput")
