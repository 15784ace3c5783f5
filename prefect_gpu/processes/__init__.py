"""The one-shot child: how it is started, watched, spoken to and ended.

`launcher` and `guardian` are the parent's side, `bootstrap` and `child` the child's, `messages` what
they say to each other, `transport` how values travel. Which device a child gets, and when, is
decided elsewhere; what its body does is Prefect's and the user's.
"""
