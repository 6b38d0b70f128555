from hileval.gates.declare import load_gates, options, serve_command

GATES = load_gates().gates


def test_arguments_become_options():
    arguments = {"tensor_parallel_size": 8, "enforce_eager": True, "enable_prefix_caching": False, "revision": None}
    assert options(arguments) == ["--tensor-parallel-size", "8", "--enforce-eager", "--no-enable-prefix-caching"]


def test_the_command_of_a_hub_model_names_backend_port_and_loopback():
    command = serve_command(GATES["qwen3-235b-fp8"])
    text = " ".join(command)
    assert text.startswith("vllm serve Qwen/Qwen3-235B-A22B-FP8 --host 127.0.0.1 --port {port} ")
    assert "--attention-backend CUSTOM --worker-extension-cls pagedkv." in text
    assert "--tensor-parallel-size 8" in text
    assert "--kv-cache-dtype fp8" in text


def test_a_model_of_this_repository_is_a_folder():
    assert serve_command(GATES["pocket-hybrid"])[2].endswith("evals/pocket/hybrid")
