# Stands for classes of attrs in a script, whose fields have `attrs.NOTHING` in place of a default.
import attrs
from checks import TAGS, check
from prefect import task


@attrs.define
class Config:
    path: str
    lr: float = attrs.field(default=0.1, validator=attrs.validators.gt(0))
    names: list = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class Fixed:
    a: int
    b: int = attrs.field(converter=int, default="3")


@task(tags=TAGS)
def required():
    return [
        a.name for each in (Config, Fixed) for a in attrs.fields(each) if a.default is attrs.NOTHING
    ]


@task(tags=TAGS)
def used(config):
    try:
        config.lr = -1.0
    except ValueError:
        return attrs.evolve(config, path="q"), Fixed(a=1).b, attrs.asdict(Fixed(a=2))


@task(tags=TAGS)
def derived():
    @attrs.define
    class More(Config):
        extra: int = 1

    return [a.name for a in attrs.fields(More)], More("p").names


if __name__ == "__main__":
    check(
        (required, (), ["path", "a"]),
        (used, (Config("p"),), (Config("q"), 3, {"a": 2, "b": 3})),
        (derived, (), (["path", "lr", "names", "extra"], [])),
    )
