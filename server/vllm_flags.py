"""Flags of `vllm serve` that Longwave does not have: which values ask for what it does anyway, and what there is in the
place of the others. Knows no setting, and no flag that Longwave has, too."""

from typing import NamedTuple

ON, OFF = ("on",), ("off",)  # what a flag without a value asks for when nothing changes
MODEL = ("the model itself",)
NONE: tuple[str, ...] = ()

ONE_GPU = "one GPU, or the CPU, serves the model"
TEXT = "no images, audio or video are taken: leave it out"
DRAFTS = "there is no draft model: guesses are quoted from the text itself, --num-speculative-tokens at once (0: none)"
PIECES = "--max-num-batched-tokens and --tpot-target-ms bound the pieces of prompts"
CONFIG = "the model's config.json is what counts: edit it in a copy of the model's folder"
KERNELS = "which kernels serve is Longwave's choice, and `longwave doctor` says which and why"
GRAPHS = "which steps are CUDA graphs is decided as they come; --enforce-eager: none"
OFFLOAD = "KV blocks that the device gives up go where --kv-offload-gb and --kv-offload-dir say"
WEIGHTS = "weights stay on the device; --kv-offload-gb is room in host memory for KV blocks"
TOOLS = "there is no tool calling: requests with tools are refused"
REASONING = "what a model thinks stays in the text of its answer; --default-chat-template-kwargs can turn thinking off"
STRUCTURED = "there is no structured output: requests for it are refused"
TLS = "TLS is for a reverse proxy in front to end (SECURITY.md)"
CORS = "pages of --allowed-origins may ask with every method and header"
METRICS = "/metrics has what is measured, always (docs/metrics.md)"
LOGGED = "prompts and answers are not logged; a request has one line, with its route, status and time"
RECURRENT = "models with a recurrent state are not served: leave it out"
LORA = "LoRA adapters have --max-loras, --max-lora-rank and --max-cpu-loras, and are of the model's dtype"
READING = "safetensors are read in one way, by threads"
QUANTIZED = "quantisation is read from the model's config.json, and nothing else is quantised (docs/quantised.md)"
TOKENISING = "long texts are tokenised in threads: leave it out"
REMOTE = "code that comes with a model is never run: leave it out"
POOLING = "only generation is served"

#: Names (one with + takes several values), the values that are accepted and change nothing, and what there is instead.
TABLE: tuple[tuple[str, tuple[str, ...], str], ...] = (
    # How many devices and processes.
    (
        "--tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp --nnodes -n "
        "--data-parallel-size-local -dpl --decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp",
        ("1",),
        ONE_GPU,
    ),
    ("--node-rank -r", ("0",), ONE_GPU),
    ("--distributed-executor-backend --data-parallel-backend -dpb", ("mp", "uni"), ONE_GPU),
    (
        "--enable-expert-parallel -ep --enable-eplb --enable-elastic-ep --enable-dbo --enable-ep-weight-filter "
        "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe --data-parallel-multi-port-external-lb -dpm "
        "--ray-workers-use-nsight --worker-use-ray --engine-use-ray --headless --aggregate-engine-logging "
        "--disable-nccl-for-dp-synchronization --fully-sharded-loras",
        OFF,
        ONE_GPU,
    ),
    ("--disable-custom-all-reduce", ON, ONE_GPU),
    (
        "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-address -dpa "
        "--data-parallel-rpc-port -dpp --master-addr --master-port --all2all-backend --eplb-config --ubatch-size "
        "--expert-placement-strategy --dbo-decode-token-threshold --dbo-prefill-token-threshold --dcp-comm-backend "
        "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size --distributed-timeout-seconds "
        "--cpu-distributed-timeout-seconds",
        NONE,
        ONE_GPU,
    ),
    ("--worker-cls", ("auto",), "there are no workers to replace"),
    ("--worker-extension-cls --additional-config", NONE, "there are no workers to extend"),
    ("--api-server-count -asc", ("1",), "one process answers HTTP; start several servers behind a balancer"),
    ("--disable-frontend-multiprocessing", OFF, "the engine always has a process of its own"),
    ("--numa-bind", OFF, "start the server under numactl"),
    ("--numa-bind-nodes+ --numa-bind-cpus+", NONE, "start the server under numactl"),
    # The model and its files.
    ("--tokenizer", MODEL, "the tokenizer is the one in the model's folder"),
    ("--tokenizer-mode", ("auto", "hf"), "the tokenizer is the model's own, in its fast form where it has one"),
    (
        "--renderer-num-workers --tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config",
        NONE,
        TOKENISING,
    ),
    ("--skip-tokenizer-init --tokens-only", OFF, "the server needs the tokenizer: clients send and get text"),
    ("--revision", NONE, "the revision is part of the model's name: --model owner/name@{value}"),
    ("--tokenizer-revision", NONE, "the tokenizer comes with the model: --model owner/name@{value}"),
    ("--trust-remote-code", OFF, REMOTE),
    ("--code-revision", NONE, REMOTE),
    ("--hf-config-path", MODEL, CONFIG),
    ("--config-format", ("auto", "hf"), CONFIG),
    ("--hf-overrides --rope-scaling --rope-theta --override-attention-dtype --override-neuron-config", NONE, CONFIG),
    ("--hf-token", NONE, "the variable HF_TOKEN holds the hub's token"),
    ("--download-dir", NONE, "downloads from the hub go where the variable HF_HOME says"),
    ("--quantization -q", NONE, QUANTIZED),
    ("--quantization-config --quantization-param-path", NONE, QUANTIZED),
    ("--allow-deprecated-quantization", OFF, QUANTIZED),
    ("--model-loader-extra-config", ("{}",), READING),
    (
        "--safetensors-load-strategy --safetensors-prefetch-num-threads --safetensors-prefetch-block-size "
        "--pt-load-map-location --max-parallel-loading-workers --ignore-patterns+",
        NONE,
        READING,
    ),
    ("--use-tqdm-on-load", OFF, "reading weights shows no progress bar; /health/startup says when it is done"),
    ("--model-impl", ("auto", "transformers"), "models are transformers' modules on Longwave's attention"),
    ("--disable-sliding-window", OFF, "windows of a model's attention are kept; --max-model-len bounds its context"),
    ("--task --runner", ("auto", "generate"), POOLING),
    ("--convert", ("auto", "none"), POOLING),
    ("--pooler-config --override-pooler-config --io-processor-plugin", NONE, POOLING),
    ("--enable-sleep-mode --enable-cumem-allocator", OFF, "the server does not sleep: end it, and start it again"),
    ("--enable-prompt-embeds", OFF, "prompts are text or token ids"),
    ("--enable-return-routed-experts", OFF, "replies do not name experts"),
    ("--language-model-only", ON, TEXT),
    (
        "--limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs --mm-processor-cache-gb "
        "--mm-processor-cache-type --mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend "
        "--mm-encoder-attn-dtype --mm-tensor-ipc --video-pruning-rate --allowed-local-media-path "
        "--allowed-media-domains+ --default-mm-loras",
        NONE,
        TEXT,
    ),
    (
        "--enable-mm-embeds --mm-encoder-only --interleave-mm-strings --skip-mm-profiling --disable-chunked-mm-input "
        "--disable-mm-preprocessor-cache --enable-mm-processor-stats --enable-tower-connector-lora",
        OFF,
        TEXT,
    ),
    (
        "--mamba-backend --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size --mamba-cache-mode",
        NONE,
        RECURRENT,
    ),
    # Steps and memory.
    ("--enable-chunked-prefill", ON, f"prompts are always computed in pieces; {PIECES}"),
    ("--long-prefill-token-threshold", ("0",), PIECES),
    ("--max-num-partial-prefills --max-long-partial-prefills", NONE, PIECES),
    ("--scheduler-delay-factor", ("0",), PIECES),
    (
        "--scheduling-policy",
        NONE,
        "the order is Longwave's own: API keys in turn, and of one the prompts that are soonest done, with ageing",
    ),
    ("--scheduler-cls", NONE, "the scheduler is Longwave's own"),
    ("--scheduler-reserve-full-isl", OFF, "requests start as the scheduler finds blocks for them"),
    ("--async-scheduling", ON, "steps always overlap"),
    ("--disable-async-output-proc", OFF, "steps always overlap"),
    ("--num-scheduler-steps --stream-interval", ("1",), "tokens are sent after each step"),
    ("--preemption-mode", ("recompute",), f"what gave up its blocks is computed again; {OFFLOAD}"),
    ("--use-v2-block-manager", ON, "there is one way to keep KV blocks"),
    ("--disable-hybrid-kv-cache-manager", ON, "all layers keep as many KV blocks"),
    ("--prefix-caching-hash-algo", ("sha256",), "blocks are found by SHA-256"),
    ("--disable-cascade-attn", OFF, "prefixes that requests share are read once where that saves more than it costs"),
    ("--kv-sharing-fast-prefill", OFF, "prompts are computed in all layers"),
    ("--swap-space --kv-offloading-size", ("0",), OFFLOAD),
    ("--kv-offloading-backend --kv-transfer-config --kv-events-config --ec-transfer-config", NONE, OFFLOAD),
    (
        "--weight-transfer-config",
        NONE,
        "weights come from files; /v1/training and /v1/fine_tuning/jobs train them here",
    ),
    ("--cpu-offload-gb --offload-group-size", ("0",), WEIGHTS),
    ("--offload-backend --offload-num-in-group --offload-prefetch-step", NONE, WEIGHTS),
    ("--cpu-offload-params+ --offload-params+ --offload-selectors+", NONE, WEIGHTS),
    ("--calculate-kv-scales", ON, "--kv-cache-dtype fp8 always measures its scales when the model is loaded"),
    ("--kv-cache-dtype-skip-layers+", NONE, "--kv-cache-dtype is that of all layers"),
    (
        "--max-seq-len-to-capture --max-cudagraph-capture-size --cudagraph-capture-sizes+ --cuda-graph-sizes+ -O "
        "--optimization-level --compilation-config -cc --performance-mode",
        NONE,
        GRAPHS,
    ),
    ("--moe-backend --linear-backend", ("auto",), KERNELS),
    (
        "--attention-backend --attention-config -ac --kernel-config --ir-op-priority --gdn-prefill-backend",
        NONE,
        KERNELS,
    ),
    ("--enable-flashinfer-autotune", OFF, KERNELS),
    (
        "--speculative-config -sc --speculative-model --spec-model --spec-method --spec-tokens "
        "--speculative-draft-tensor-parallel-size --speculative-max-model-len --speculative-disable-by-batch-size "
        "--speculative-model-quantization --spec-decoding-acceptance-method --num-lookahead-slots",
        NONE,
        DRAFTS,
    ),
    (
        "--ngram-prompt-lookup-max --ngram-prompt-lookup-min",
        NONE,
        "there are --prompt-lookup-max and --prompt-lookup-min",
    ),
    # What a request gets.
    ("--seed", NONE, "seeds are the requests' own, and one without gets a random one: leave it out"),
    ("--max-logprobs", NONE, "the bounds are fixed: 20 in chats and prompt_logprobs, 5 in completions"),
    ("--logprobs-mode", ("raw_logprobs",), "log-probabilities are the model's own, before penalties and temperature"),
    ("--use-fp64-gumbel", OFF, "the noise of sampling is float32"),
    ("--override-generation-config", ("{}",), "--generation-config says whose sampling counts; requests may say more"),
    ("--logits-processors+ --logits-processor-pattern", NONE, "requests have logit_bias, and there is no code to add"),
    ("--enable-auto-tool-choice --exclude-tools-when-tool-choice-none", OFF, TOOLS),
    ("--tool-call-parser --tool-parser-plugin --tool-server", NONE, TOOLS),
    ("--enable-reasoning", OFF, REASONING),
    ("--reasoning-parser --reasoning-parser-plugin --reasoning-config", NONE, REASONING),
    ("--guided-decoding-backend --structured-outputs-config", NONE, STRUCTURED),
    ("--guided-decoding-disable-fallback --guided-decoding-disable-any-whitespace", OFF, STRUCTURED),
    ("--chat-template-content-format", ("auto", "string"), "a template is given each message's text"),
    ("--trust-request-chat-template", OFF, "a request brings no chat template; --chat-template is the operator's"),
    ("--response-role", ("assistant",), "the role of answers is assistant"),
    ("--return-tokens-as-token-ids", OFF, "log-probabilities name tokens by their text and bytes"),
    ("--enable-prompt-tokens-details", ON, "usage always says how many tokens were cached"),
    ("--enable-force-include-usage", OFF, "a stream has its usage where its request says stream_options.include_usage"),
    ("--enable-per-request-metrics", OFF, METRICS),
    ("--fingerprint-mode", ("none",), "replies have no fingerprint of the system"),
    ("--fingerprint-value", NONE, "replies have no fingerprint of the system"),
    ("--lora-dtype", ("auto",), LORA),
    ("--lora-extra-vocab-size", ("0",), LORA),
    ("--long-lora-scaling-factors --lora-target-modules+", NONE, LORA),
    ("--enable-lora-bias --enable-mixed-moe-lora-format --specialize-active-lora", OFF, LORA),
    ("--enable-prompt-adapter", OFF, "adapters are LoRA's: --enable-lora"),
    ("--max-prompt-adapters --max-prompt-adapter-token", NONE, "adapters are LoRA's: --enable-lora"),
    # HTTP, the log and measurements.
    ("--config", NONE, "there is no file of flags; each flag of Longwave's is a variable, too"),
    ("--uds", NONE, "the server listens on TCP: --host and --port"),
    ("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-cert-reqs --ssl-ciphers", NONE, TLS),
    ("--enable-ssl-refresh", OFF, TLS),
    ("--allowed-methods --allowed-headers", ('["*"]',), CORS),
    ("--allow-credentials", OFF, "requests bring an API key, and no cookies that a page might send with them"),
    ("--root-path", NONE, "paths begin at /: a reverse proxy in front can take a prefix off"),
    ("--middleware", NONE, "there is no code to add: put it into a reverse proxy in front"),
    ("--enable-request-id-headers", ON, "replies always have x-request-id"),
    (
        "--disable-fastapi-docs",
        OFF,
        "/openapi.json is always served, and asks for the API key; there are no pages of it",
    ),
    ("--enable-offline-docs", OFF, "/openapi.json describes the API; there are no pages of it"),
    ("--enable-tokenizer-info-endpoint", OFF, "there is no such endpoint"),
    ("--enable-server-load-tracking", OFF, METRICS),
    (
        "--h11-max-incomplete-event-size --h11-max-header-count",
        NONE,
        "bounds of headers are fixed; --max-body-bytes is the body's",
    ),
    ("--uvicorn-log-level", NONE, "--log-level is the server's; libraries tell warnings at most"),
    ("--disable-uvicorn-access-log", OFF, "--log-level warning leaves out the lines of requests"),
    (
        "--disable-access-log-for-endpoints",
        NONE,
        "probes and /metrics are logged only when their answer is another one",
    ),
    ("--log-config-file", NONE, "the log goes to stderr, in one format; there is --log-level"),
    ("--disable-log-requests", ON, LOGGED),
    ("--enable-log-requests --enable-log-outputs --enable-log-deltas", OFF, LOGGED),
    ("--max-log-len", NONE, f"{LOGGED}: leave it out"),
    ("--log-error-stack", OFF, "a failure of the server's own is always logged with its stack"),
    ("--disable-log-stats", ON, f"no statistics are logged; {METRICS}"),
    ("--otlp-traces-endpoint --collect-detailed-traces+ --profiler-config", NONE, f"there are no traces; {METRICS}"),
    ("--show-hidden-metrics-for-version --kv-cache-metrics-sample", NONE, METRICS),
    (
        "--kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics --enable-layerwise-nvtx-tracing "
        "--enable-logging-iteration-details",
        OFF,
        METRICS,
    ),
    ("--fail-on-environ-validation", OFF, "a variable LONGWAVE_* that names no setting is logged"),
)


class Flag(NamedTuple):
    accepted: tuple[str, ...]
    instead: str
    takes_several: bool

    @property
    def is_switch(self) -> bool:
        return self.accepted in (ON, OFF)


FLAGS = {
    name.removesuffix("+"): Flag(accepted, instead, name.endswith("+"))
    for names, accepted, instead in TABLE
    for name in names.split()
}
