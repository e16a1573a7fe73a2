"""Lets only those pipeline stages go back after a failure that lost something.

What crosses the boundaries of stages is kept by its senders: ``interception`` sees it, ``recording`` keeps it. A rank
that goes back gets from these logs what its neighbours sent and what groups with them agreed on (MoEvement, section
3.4) by ``exchange``.
"""
