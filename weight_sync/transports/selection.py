"""Selection of the transport from the devices of the models. Pure, and light to import."""

from collections.abc import Mapping

from weight_sync.protocol import TransportUnusable

CPU = "cpu"


def choose(asked: str, own: str, actors: Mapping[str, str]) -> str:
    """The transport between the learner's device and the actors' (name → device).

    `asked` is `weight_sync.transport`: "auto", or one by name. Raises TransportUnusable, with both
    sides' devices, when that one cannot join them.
    """
    others = list(actors.values())
    on_gpus = own != CPU and CPU not in others
    usable = {
        "cuda_ipc": on_gpus and set(others) == {own},
        "nccl": on_gpus and len({own, *others}) == 1 + len(others),
        "gloo": True,
        "snapshot": True,
    }
    if asked == "auto":
        return next(kind for kind, works in usable.items() if works)
    if not usable[asked]:
        theirs = ", ".join(f"{name} on {device}" for name, device in actors.items())
        needs = "every model on one GPU" if asked == "cuda_ipc" else "a GPU for each model"
        raise TransportUnusable(
            f"weight_sync.transport = {asked!r} needs {needs}: the learner is on {own}, {theirs}; "
            "set it to 'auto'"
        )
    return asked
