"""What `model.generate(custom_generate="<this folder>", trust_remote_code=True, …)` of transformers runs."""

from misvo.integrations.transformers import generate_from_folder


def generate(model, **arguments):
    """Steer each prompt toward `reward=`; `tokenizer=` is needed too. Other names are settings of misvo or generate."""
    return generate_from_folder(model, **arguments)
