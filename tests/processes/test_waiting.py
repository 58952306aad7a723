"""Who is next in a line, and whose clock stands still."""

import asyncio
import time

from hrl.processes.waiting import Clock, Places, in_line


def test_places_are_given_in_the_order_in_which_they_were_asked_for():
    places = Places(1)
    first, second, third, fourth = (places.ask() for _ in range(4))
    assert [one.done() for one in (first, second, third, fourth)] == [True, False, False, False]
    places.leave(second)  # withdraws
    places.leave(first)
    assert third.done() and not fourth.done()
    places.resize(2)
    assert fourth.done()
    places.leave(third)
    places.leave(fourth)
    assert places.ask().done() and places.ask().done() and not places.ask().done()


def test_a_clock_stands_still_in_line_also_for_what_a_call_has_begun_and_not_for_ever():
    async def waits(seconds):
        with in_line():
            await asyncio.sleep(seconds)

    async def call(timeout_s, *waiting_s):
        with Clock() as clock:
            running = asyncio.gather(*(asyncio.create_task(waits(one)) for one in waiting_s))
        try:
            return await clock.finishes_within(running, timeout_s), clock
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def calls():
        begun_s = time.monotonic()
        is_done, clock = await call(0.1, 0.3, 0.25)
        assert is_done and 0.3 <= clock.waited_s <= time.monotonic() - begun_s  # counted once
        is_done, clock = await call(0.01, 60.0)
        assert not is_done and clock.waited_s < 30.0  # it waits in line for four times its deadline, and no longer
        with Clock() as outer:
            assert (await call(0.1, 0.2))[0] and outer.waited_s >= 0.2

    asyncio.run(calls())
