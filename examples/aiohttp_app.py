"""Training inside an aiohttp application, which goes on answering while the agent learns.

    .venv/bin/python examples/aiohttp_app.py
    curl localhost:8080/progress
    json='Content-Type: application/json'
    curl localhost:8080/chat -H "$json" -d '{"messages": [{"role": "user", "content": "where is order K27"}]}'
    curl -X POST localhost:8080/pause -H "$json"        (then /resume, and /stop to end early)

A POST has to say that it is JSON, which a page of another site cannot do unasked: see
`stateset_agents.runtime.http_guard`.

Ctrl-C ends the application: the step under way is finished and kept, and the run folder has its report.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
from collections.abc import AsyncIterator

from aiohttp import web

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.rewards import EnvironmentReward
from stateset_agents.runtime.http_guard import HttpGuard
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.errors import ConfigurationError

TRAINER = web.AppKey("trainer", MultiTurnGRPOTrainer)
routes = web.RouteTableDef()


@routes.get("/progress")
async def progress(request: web.Request) -> web.Response:
    """Step, metrics of the last one, and whether it runs, holds or has ended, and why."""
    return web.json_response(request.app[TRAINER].progress.to_json())


@routes.post("/chat")
async def chat(request: web.Request) -> web.Response:
    """The agent's next words, with the weights of the last finished step."""
    try:
        messages = json.loads(await request.read())["messages"]
    except (web.RequestPayloadError, ValueError, RecursionError, TypeError, KeyError):
        raise web.HTTPBadRequest(
            text='the body must be {"messages": [{"role": "user", "content": ...}]}'
        ) from None
    try:
        reply = await request.app[TRAINER].agent.generate_response(messages)
    except ConfigurationError as error:  # no message, or more than the model's context holds
        raise web.HTTPBadRequest(text=str(error)) from error
    return web.json_response({"reply": reply})


@routes.post("/pause")
async def pause(request: web.Request) -> web.Response:
    """Hold after the step under way; answers when it holds."""
    request.app[TRAINER].pause()
    return web.json_response({"state": await request.app[TRAINER].wait_for("paused")})


@routes.post("/resume")
async def resume(request: web.Request) -> web.Response:
    """Go on; answers when it does."""
    request.app[TRAINER].resume()
    return web.json_response({"state": await request.app[TRAINER].wait_for("running", "pausing")})


@routes.post("/stop")
async def stop(request: web.Request) -> web.Response:
    """End after the step under way; answers when its checkpoint stands. The agent goes on speaking."""
    request.app[TRAINER].request_stop()
    return web.json_response({"state": await request.app[TRAINER].wait_for("stopped")})


async def training(app: web.Application) -> AsyncIterator[None]:
    """Trains from the application's start on; its end waits for the step under way."""
    async with app[TRAINER] as trainer:
        gc.freeze()  # else a collection walks all of torch and transformers, and everyone waits 1/4 s
        task = asyncio.create_task(trainer.train())
        yield
    await task  # raises what the training raised


def create_app(trainer: MultiTurnGRPOTrainer) -> web.Application:
    """The application that trains with this trainer."""
    app = web.Application(middlewares=[HttpGuard().middleware()])
    app[TRAINER] = trainer
    app.add_routes(routes)
    app.cleanup_ctx.append(training)
    return app


def main(port: int) -> None:
    """Train the embedded model on the retail desk and serve it on this port."""
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48))
    config = TrainingConfig(run_name="aiohttp", max_steps=110)
    web.run_app(
        create_app(MultiTurnGRPOTrainer(agent, RetailDesk(), EnvironmentReward(), config)),
        host="127.0.0.1",
        port=port,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, default=8080)
    main(parser.parse_args().port)
