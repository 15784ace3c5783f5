# source: https://github.com/pydantic/pydantic/issues/7404
# `pydantic.ValidationError` can be pickled, not unpickled; the flow reads its list of errors.
from checks import RUNNER, TAGS
from prefect import flow, task
from pydantic import BaseModel, ValidationError, field_validator


class Config(BaseModel):
    lr: float
    steps: int

    @field_validator("steps")
    @classmethod
    def positive(cls, steps):
        if steps < 1:
            raise ValueError("must be positive")
        return steps


@task(tags=TAGS)
def parse(given):
    return Config.model_validate(given)


@flow(task_runner=RUNNER)
def main():
    try:
        parse.submit({"lr": "fast", "steps": 0}).result()
    except ValidationError as error:
        return (
            error.title,
            [(each["loc"], each["type"]) for each in error.errors()],
            "positive" in str(error),
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"


if __name__ == "__main__":
    got = main()
    assert got == ("Config", [(("lr",), "float_parsing"), (("steps",), "value_error")], True), got
