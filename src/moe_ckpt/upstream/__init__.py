"""Messages over the boundaries of pipeline stages, kept by their senders, so that one stage can be computed again
alone.

A rank that goes back gets from these logs what its neighbours sent and what groups with them agreed on (MoEvement,
section 3.4): ``interception`` sees it, ``recording`` keeps it, ``answering`` gives it.
"""
