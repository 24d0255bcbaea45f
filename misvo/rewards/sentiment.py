"""`sentiment`: the VADER compound score of a response, from −1 (bad news) to 1 (good news)."""

from misvo.errors import MisvoError
from misvo.prompts import as_text


class Sentiment:
    scores_prefixes = True

    def __init__(self):
        try:
            from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer
        except ImportError as error:
            raise MisvoError("the reward 'sentiment' needs vaderSentiment: pip install 'misvo[embedded]'") from error
        self.analyzer = SentimentIntensityAnalyzer()

    def __call__(self, prompts, completions, **columns):
        return [self.analyzer.polarity_scores(as_text(completion))["compound"] for completion in completions]
