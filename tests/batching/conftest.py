from hypothesis import settings

# Properties are about results; how long an example takes on a busy machine is none of them.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
