"""The embedded model by llama.cpp, in f32: what somebody may take instead of our engine (`speed.py --only llama.cpp`).

    pip install --no-binary llama-cpp-python llama-cpp-python    # builds llama.cpp for this CPU, some ten minutes

The same weights, dequantized from the same file, an f32 cache, as many threads. A prompt is read once and shared by its
rows, rows decode in one batch, and tokens are drawn by llama.cpp's own sampler from the whole law.
"""

import tempfile
from pathlib import Path

import gguf
import llama_cpp
import torch

from misvo.embedded import MODELS, wheel_paths

VIRTUAL = "GGUF."  # before the names of what the reader tells of the file itself


def write_f32(source: Path, target: Path) -> None:
    """A GGUF with all tensors dequantized to f32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for name, field in reader.fields.items():
        if not name.startswith(VIRTUAL) and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Sampling:
    """K rows of T tokens behind a prompt."""

    def __init__(self, rollouts: int, tokens: int, longest_prompt: int = 1024, name: str = "smollm2-135m"):
        self.rows, self.tokens = rollouts, tokens
        llama_cpp.llama_log_set(_silent, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_f32(wheel_paths(MODELS[name])[0], path)
            options = llama_cpp.llama_model_default_params()
            options.use_mmap = False  # the file is gone in a moment
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = longest_prompt + rollouts * tokens
        options.n_seq_max, options.kv_unified = rollouts, True
        options.n_batch = options.n_ubatch = at_once = max(longest_prompt, rollouts)
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(at_once, 0, 1)

    def __call__(self, prompt: list[int], seed: int) -> list[list[int]]:
        """Token ids of the rows."""
        sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_dist(seed))
        llama_cpp.llama_memory_clear(self.memory, True)
        self._read([(token, place, 0, place == len(prompt) - 1) for place, token in enumerate(prompt)])
        for row in range(1, self.rows):
            llama_cpp.llama_memory_seq_cp(self.memory, 0, row, -1, -1)
        last = len(prompt) - 1
        rows = [[llama_cpp.llama_sampler_sample(sampler, self.context, last)] for _ in range(self.rows)]
        for place in range(len(prompt), len(prompt) + self.tokens - 1):
            self._read([(row[-1], place, index, True) for index, row in enumerate(rows)])
            for index, row in enumerate(rows):
                row.append(llama_cpp.llama_sampler_sample(sampler, self.context, index))
        llama_cpp.llama_sampler_free(sampler)
        return rows

    def _read(self, tokens):
        """Tokens with their places, rows, and whether their logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for index, (token, place, row, wanted) in enumerate(tokens):
            batch.token[index], batch.pos[index], batch.logits[index] = token, place, wanted
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        if code := llama_cpp.llama_decode(self.context, batch):
            raise SystemExit(f"llama_decode says {code}.")


@llama_cpp.llama_log_callback
def _silent(level, text, data):
    pass
