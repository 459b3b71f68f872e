"""Selection of the transport from the devices of the models. Pure, and light to import."""

from collections.abc import Mapping, Sequence

from weight_sync.protocol import TransportUnusable

CPU = "cpu"


def choose(asked: str, own: str, actors: Mapping[str, Sequence[str]]) -> str:
    """The transport between the learner's device and the actors' (name → its workers' devices).

    `asked` is `weight_sync.transport`: "auto", or one by name. Raises TransportUnusable, with both
    sides' devices, when that one cannot join them.
    """
    others = [device for workers in actors.values() for device in workers]
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
        one = "every model on one GPU, and one worker an engine (actors.tensor_parallel = 1)"
        needs = one if asked == "cuda_ipc" else "a GPU for each model, or worker of one"
        raise TransportUnusable(
            f"weight_sync.transport = {asked!r} needs {needs}: the learner is on {own}, "
            f"{shown(actors)}; set it to 'auto'"
        )
    return asked


def shown(actors: Mapping[str, Sequence[str]]) -> str:
    """The actors, each with its workers' devices."""
    return ", ".join(f"{name} on {' and '.join(workers)}" for name, workers in actors.items())
