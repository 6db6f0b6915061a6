"""What holds for one call of a model."""


def test_calls_and_what_happens_in_them_are_in_order_within_a_tick_of_the_clock(engine):
    module = engine("background.model_call")
    moments = [moment for _ in range(1000) for moment in (module.ModelCall().began, module.next_moment())]
    assert moments == sorted(set(moments))
