"""The methods, one small file each; `base` says what a method is. A diff of two of them is the documentation."""

from misvo.methods.aisp import Aisp
from misvo.methods.base import Method
from misvo.methods.best_of_n import BestOfN
from misvo.methods.blockwise import Blockwise
from misvo.methods.lora import Lora
from misvo.methods.misvo import Misvo
from misvo.methods.particles import Particles
from misvo.methods.re_control import ReControl

METHODS: dict[str, type[Method]] = {
    "misvo": Misvo,
    "best-of-n": BestOfN,
    "aisp": Aisp,
    "re-control": ReControl,
    "particles": Particles,
    "blockwise": Blockwise,
    "lora": Lora,
}
