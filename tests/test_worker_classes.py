"""Classes of workers: who is in which, what each has, and what is refused in one line.

Modules: `serve_app/worker_args.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from epd.errors import RequestError
from epd.serve_app.app_args import STAGE_FIELDS, AppArgs
from epd.serve_app.composition import worker_settings
from epd.serve_app.local.fleet import LocalTransport
from epd.serve_app.worker.worker_stages import StageBuilder
from epd.topology import parse_topology
from epd.worker_classes import class_parts, class_workers, given_classes

SMALL = "small=roles:e,count:4,device:cpu,num_threads:4"


def args_with(*classes: str, **options: Any) -> AppArgs:
    return AppArgs(**{"topology": "4e1pd", "worker_classes": list(classes), **options})


def test_a_line_and_a_mapping_say_the_same() -> None:
    mapping = {"small": {"roles": "e", "count": 4, "device": "cpu", "num_threads": 4}}
    assert (
        args_with(SMALL) == args_with(SMALL).model_copy() == AppArgs(topology="4e1pd", worker_classes=mapping)
    )
    assert AppArgs(worker_classes=None).worker_classes == given_classes(None) == {}
    assert AppArgs(topology="4e1pd", worker_classes=SMALL).worker_classes == args_with(SMALL).worker_classes


def test_a_class_takes_workers_of_its_roles_and_the_rest_is_as_before() -> None:
    args = args_with(SMALL, "large=roles:pd")
    assert {name: str(part) for name, part in args.parts.items()} == {"small": "4e", "large": "1pd"}
    assert [*args.workers] == ["small0", "small1", "small2", "small3", "large0", "v0"]
    part = args_with("few=roles:e,count:1", "more=roles:e,count:2")
    assert {name: str(part) for name, part in part.parts.items()} == {"": "1e1pd", "few": "1e", "more": "2e"}
    assert part.classes == {"e0": "", "pd0": "", "few0": "few", "more0": "more", "more1": "more"}
    assert part.workers["more1"] == {"encode"}
    plain = class_workers(class_parts("2e1p1d", {}))
    assert {name: roles for name, (_, roles) in plain.items()} == {
        each.name: each.roles for each in parse_topology("2e1p1d").workers()
    }


def test_a_class_has_its_own_options_and_everybody_elses() -> None:
    args = args_with(SMALL, device="cuda", dtype="bfloat16", max_num_seqs=7)
    small = args.of_class("small")
    assert (small.device, small.dtype, small.num_threads, small.max_num_seqs) == ("cpu", "bfloat16", 4, 7)
    assert args.of_class("").device == "cuda"
    sent = args.for_workers(*STAGE_FIELDS)
    assert sent.parts == args.parts
    settings = worker_settings(sent, "small")
    assert (settings.engine.device, settings.num_threads) == ("cpu", 4)
    assert worker_settings(sent, "").engine.device == "cuda"
    assert worker_settings(AppArgs()).num_threads is None, "where there are no classes nothing is set"


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (["small"], {}, "received the worker class 'small'; allowed: NAME=KEY:VALUE"),
        (["small=roles"], {}, "received the worker class 'small=roles'; allowed: NAME=KEY:VALUE"),
        (["small=roles:e,colour:red"], {}, "colour"),
        (["small=count:2"], {}, "roles"),
        (["small=roles:e,device:tpu"], {}, "received the device 'tpu'; allowed: auto, cpu"),
        (["small=roles:e,dtype:int8"], {}, "received the dtype 'int8'; allowed: auto"),
        (["small=roles:e,count:5"], {}, "'small' of 5 x 'e' in the topology '4e1pd', which has 4 such"),
        (["small=roles:ep"], {}, "'small' of 'ep' in the topology '4e1pd', which has 0 such workers left"),
        (["small=roles:dp"], {}, "allowed: roles in the order e, p, d"),
        (["one=roles:e", "other=roles:e"], {}, "'other' of 'e' in the topology '4e1pd', which has 0 such"),
        (["ep=roles:e"], {}, "a worker class of the name 'ep'; allowed: small letters"),
        (["e7=roles:e"], {}, "a worker class of the name 'e7'; allowed: small letters"),
        (
            [SMALL, "large=roles:pd"],
            {"elastic": True},
            "received elastic with worker_classes small, large, which have all workers; allowed: beside",
        ),
        (
            ["small=roles:e,dtype:bfloat16"],
            {"device": "cpu", "elastic": True},
            "that encode in bfloat16 and in float32; allowed: one dtype",
        ),
        (
            ["small=roles:e,count:1,dtype:bfloat16"],
            {"device": "cpu"},
            "that encode in bfloat16 and in float32; allowed: one dtype",
        ),
        (
            ["small=roles:e,count:1,device:cpu"],
            {"device": "cuda"},
            "that encode in float32 and in the checkpoint's type on a GPU; allowed: one dtype",
        ),
        (
            ["large=roles:d,dtype:float16"],
            {"topology": "1e1p1d", "dtype": "float32"},
            "that prefill and decode in float16 and in float32; allowed: one dtype",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line(
    lines: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((RequestError, ValidationError)) as refused:
        args_with(*lines, **options).resolved()
    assert message in str(refused.value)
    if isinstance(refused.value, RequestError):
        assert "\n" not in str(refused.value)


def test_types_of_encoders_and_of_language_models_may_differ() -> None:
    """Embeddings travel in the type of the language model. What is kept says how it came to be."""
    args = args_with(SMALL, device="cuda:1", dtype="bfloat16")
    one = args.model_copy(update={"worker_classes": {"small": args.worker_classes["small"]}})
    assert worker_settings(one, "small").encoded_in == torch.bfloat16
    own = args_with(SMALL + ",dtype:float32", device="cuda:1", dtype="bfloat16").resolved()
    for name in ("small", ""):
        settings = worker_settings(own, name)
        assert (settings.encoded_in, settings.embeddings_in) == (torch.float32, torch.bfloat16)
    given = args_with(SMALL).on_devices(lambda name: "cpu" if name else "cuda:0")
    assert worker_settings(given, "small").encoded_in == torch.float32, "as suits a CPU"
    assert worker_settings(given, "small").embeddings_in == torch.bfloat16, "as suits a GPU"
    unknown = args_with("small=roles:e,count:1,device:cpu")
    unknown.check_classes()
    with pytest.raises(RequestError, match="that encode in float32 and in the checkpoint's type on a GPU"):
        unknown.on_devices(lambda name: "cpu" if name else "cuda:0").check_classes()


def test_what_is_kept_of_encoders_of_another_type_is_kept_apart() -> None:
    """A store that servers share must not give one the embeddings or prompts that another's encoders made."""
    facts = [
        StageBuilder(
            worker_settings(args_with(SMALL + own, device="cpu", dtype="bfloat16")), LocalTransport()
        )
        for own in ("", ",dtype:float32")
    ]
    same, other = (dict(each._facts) for each in facts)
    assert "encoded_in" not in same
    assert other == same | {"encoded_in": "torch.float32"}
