// Runs a planned attention call on a team: each thread takes one item after another.
#pragma once

namespace slipstream {
namespace {

template <class P>
inline void attend_with(const Attention& a, Team& team, int rank, const AttentionRoom& room) {
    const typename P::Session session;
    (void)session;
    float* own = room.own + room.own_floats * rank;
    const Plan& plan = *room.plan;
    each(team, plan.count, 1, [&](int64_t i, int64_t) {
        const Item& item = plan.items[i];
        Worker<P> worker(a, item, own);
        worker.run(room.partial);
        // The thread that finishes the last part combines all parts.
        if (item.parts > 1 && __atomic_add_fetch(room.done + item.join, 1, __ATOMIC_ACQ_REL) == item.parts) {
            room.done[item.join] = 0;
            worker.merge(room.partial);
        }
    });
}

// Run a planned call on the whole team, with the multiplication that the unit supports.
inline void attend(const Attention& a, Team& team, int rank, const AttentionRoom& room) {
#if defined(SLIPSTREAM_AMX)
    if (a.pairs) {
        attend_with<TileSlots>(a, team, rank, room);
        return;
    }
#elif defined(SLIPSTREAM_BF16_DOT)
    if (a.pairs) {
        attend_with<PairSlots>(a, team, rank, room);
        return;
    }
#endif
    attend_with<FloatSlots>(a, team, rank, room);
}

} // namespace
} // namespace slipstream
