# source: https://github.com/encode/httpx/pull/3108
# `httpx.HTTPStatusError` and the like: the flow asks for the status code and retries by it.
import httpx
from checks import RUNNER, TAGS
from prefect import flow, task


def respond(request):
    return httpx.Response(503, json={"retry": 1}, headers={"Retry-After": "1"}, request=request)


@task(tags=TAGS)
def status():
    with httpx.Client(transport=httpx.MockTransport(respond)) as client:
        client.get("http://service/x").raise_for_status()


@task(tags=TAGS)
def unreachable():
    httpx.get("http://127.0.0.1:9/", trust_env=False)


@flow(task_runner=RUNNER)
def main():
    got = []
    for each in (status, unreachable):
        try:
            each.submit().result()
        except httpx.HTTPStatusError as error:
            got.append((error.response.status_code, error.response.json(), str(error.request.url)))
        except httpx.ConnectError as error:
            got.append(str(error.request.url))
        except Exception as error:
            got.append(f"{type(error).__name__}: {str(error)[:300]}")
    return got


if __name__ == "__main__":
    got = main()
    assert got == [(503, {"retry": 1}, "http://service/x"), "http://127.0.0.1:9/"], got
