"""Benchmarks by their name on the command line: those of this folder and of the package."""

from __future__ import annotations

from banaserve_bench import command as bench
from banaserve_bench.command import Benchmark

BENCHMARKS = {
    **bench.SUBCOMMANDS,
    "agents": Benchmark(
        "benchmarks.agents.command",
        "What do agent sessions gain from the store, over plain engines behind balancers?",
    ),
    "break-even": Benchmark(
        "benchmarks.break_even.command",
        "Under which model, batch, link and limits do moved modules pay more than a switch?",
    ),
    "demo": Benchmark("benchmarks.demo", "What does the page show when the load swings?"),
    "elastic": Benchmark(
        "benchmarks.elastic.command",
        "Does the elastic policy keep up with the best fixed arrangement in hindsight?",
    ),
    "elastic-cpu": Benchmark(
        "benchmarks.elastic_cpu.command",
        "Are two elastic instances ever slower than two plain vLLM servers behind a balancer?",
    ),
    "elastic-paced": Benchmark(
        "benchmarks.elastic.paced",
        "Is the elastic system ever slower than plain engines on modelled GPUs?",
    ),
    "front": Benchmark("benchmarks.front", "What does the front door cost beside vLLM's own?"),
    "gpu-kit": Benchmark("benchmarks.gpu.kit", "What does a GPU machine without a network lack?"),
    "gpu-report": Benchmark(
        "benchmarks.gpu.report", "What do all checks show that need a GPU, in one page?"
    ),
    "handover": Benchmark(
        "benchmarks.handover", "What does a hand-over from prefill to decode cost?"
    ),
    "kernels": Benchmark(
        "benchmarks.kernel_bandwidth.__main__",
        "How near do the kernels come to the GPU's bandwidth?",
    ),
    "kvstore": Benchmark(
        "benchmarks.kvstore.command", "What does the KV cache store cost beside plain copies?"
    ),
    "migration": Benchmark(
        "benchmarks.migration", "What does moving layers and heads take, and bring?"
    ),
    "network": Benchmark(
        "benchmarks.network.command",
        "What share of a link between two hosts do KV blocks reach?",
    ),
    "orchestrator": Benchmark(
        "benchmarks.orchestrator", "How long does a decision take, how fast is the simulator?"
    ),
    "pacing": Benchmark(
        "benchmarks.pacing", "How well do paced engines keep the modelled GPU's time?"
    ),
    "pictures": Benchmark(
        "benchmarks.pictures", "What does the headline result look like, for README?"
    ),
    "pipeline": Benchmark(
        "benchmarks.pipeline", "How much of the store's transfers hides behind computing?"
    ),
    "plan": Benchmark(
        "benchmarks.plan.command",
        "Is `banaserve plan` right on runs of real GPUs, on paced engines and on a CPU?",
    ),
    "prefix-ttft": Benchmark(
        "benchmarks.prefix_ttft", "Is a cached prefix ever slower than computing it?"
    ),
    "recovery": Benchmark(
        "benchmarks.recovery.command",
        "How long does a stream pause when its instance is killed, beside recomputing?",
    ),
    "results": Benchmark(
        "benchmarks.results_page", "What do all committed results say, as pages with plots?"
    ),
    "router": Benchmark(
        "benchmarks.router.command", "What does a router cost a request and a streamed part?"
    ),
    "routers": Benchmark(
        "benchmarks.routers.command",
        "Which routing policy is best under which real load, and how far is the default from it?",
    ),
    "served": Benchmark(
        "benchmarks.served",
        "Does this device give the answers of plain vLLM while modules move?",
    ),
    "silicon": Benchmark(
        "benchmarks.silicon",
        "How wrong are simulated latencies, beside those of a real run on a GPU?",
    ),
    "silicon-runs": Benchmark(
        "benchmarks.whole_runs",
        "How wrong are simulated means, for each model and GPU, beside those of whole runs?",
    ),
    "silicon-table": Benchmark(
        "benchmarks.step_table",
        "How wrong are summed step times of Llama-2 and BLOOM, beside Splitwise's measured ones?",
    ),
    "simulate-paper": Benchmark(
        "benchmarks.simulate_paper.command", "What does the simulator say of BanaServe's figures?"
    ),
    "simulate-seeds": Benchmark(
        "benchmarks.simulate_seeds.command",
        "Which claims of SkyWalker, GORGO and Preble hold on real loads, by one rule?",
    ),
}
