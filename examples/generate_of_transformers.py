"""Steering behind `model.generate` of transformers, for programs that call it already.

python examples/generate_of_transformers.py
"""

import misvo
from misvo.integrations.transformers import Steered

if __name__ == "__main__":
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    model, tokenizer = policy.model, policy.tokenizer  # yours come from AutoModelForCausalLM and AutoTokenizer
    chat = [{"role": "user", "content": "Give me one tip for sleeping better."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    steered = Steered(tokenizer, "words:8-14", rollouts=4, steps=2)
    tokens = model.generate(**inputs, max_new_tokens=20, custom_generate=steered)
    print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    print(steered.results[0])  # the misvo.Result of each prompt
