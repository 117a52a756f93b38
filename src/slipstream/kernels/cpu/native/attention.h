// Attention over a paged cache or over plain rows: causal or not, with sliding windows, softcaps, ALiBi
// slopes, sinks and masks. The scores of at most one strip of rows exist at a time.
#pragma once

namespace slipstream {
namespace {

// Processes one item in one thread. Row r is query r % count of head r / count of the item.
template <class P>
class Worker {
public:
    Worker(const Attention& a, const Item& item, float* base)
        : a_(a), item_(item), slots_(ItemRoom::slots_of<P>(a.heads)), width_(a.heads.width()),
          room_(a.heads, slots_, P::kStripRows, base), group_(a.heads.group()),
          rows_(item.kvs * group_ * item.count), few_(a.heads.few(item.count)) {}

    void run(float* partial) {
        const int64_t first = most(item_.begin, first_of(item_.position));
        const int64_t end = least(item_.end, end_of(item_.position + item_.count - 1));
        begin();
        with_key_dtype(a_.k.dtype, [&](auto* type) {
            using T = typename std::remove_pointer<decltype(type)>::type;
            locate(first, most(0, least(few_ ? kFewKeys : kTileKeys, end - first)), next_);
            if (few_)
                go_through<T>(first, end);
            else
                pack_through<T>(first, end);
        });
        if (item_.parts > 1)
            keep(partial + item_.partial * (width_ + 2));
        else
            for (int64_t r = 0; r < rows_; ++r)
                write(r, room_.sums + r * width_, total_of(r));
    }

    // Combine the partial results of all parts of an item. May run in the worker of any of these parts.
    void merge(const float* partial) {
        const int64_t size = width_ + 2;
        const float* first = partial + (item_.partial - item_.part * rows_) * size;
        number_rows();
        for (int64_t r = 0; r < rows_; ++r) {
            float top = kNothing, total = 0.0f;
            for (int64_t i = 0; i < item_.parts; ++i) {
                const float own = first[(i * rows_ + r) * size + width_];
                top = own > top ? own : top;
            }
            clear(room_.sums, width_);
            for (int64_t i = 0; i < item_.parts; ++i) {
                const float* row = first + (i * rows_ + r) * size;
                const float factor = power(row[width_] - top);
                total += row[width_ + 1] * factor;
                for (int64_t j = 0; j < width_; j += Vec::kWidth)
                    fma(Vec::load(row + j), Vec::set(factor), Vec::load(room_.sums + j))
                        .store(room_.sums + j);
            }
            write(r, room_.sums, total);
        }
    }

private:
    int64_t head_of(int64_t row) const { return item_.kv * group_ + room_.head[row]; }
    int64_t token_of(int64_t row) const { return item_.token + room_.query[row]; }
    template <class V>
    int64_t place(const V& view, int64_t row) const {
        return item_.sequence * view.sequence + token_of(row) * view.token + head_of(row) * view.head;
    }
    float total_of(int64_t row) const { return Vec::load(room_.total + row * Vec::kWidth).sum(); }

    void number_rows() {
        for (int64_t r = 0, head = 0; r < rows_; ++head)
            for (int64_t query = 0; query < item_.count; ++query, ++r) {
                room_.query[r] = static_cast<int32_t>(query);
                room_.head[r] = static_cast<int32_t>(head);
            }
    }

    void begin() {
        constexpr int64_t kElements = P::kDepth * Vec::kWidth;
        const int64_t used = ceil_div(a_.heads.dim, P::kDepth);
        clear(room_.keys + used * kTileKeys, (slots_ - used) * kTileKeys);
        number_rows();
        with_dtype(a_.q.dtype, [&](auto* type) {
            const auto* from = static_cast<decltype(type)>(const_cast<void*>(a_.q.data));
            for (int64_t r = 0; r < rows_; ++r) {
                const auto* at = from + place(a_.q, r);
                float* slots = room_.q + r * slots_;
                for (int64_t d = 0; d < a_.heads.dim; d += kElements) {
                    const int64_t count = least(a_.heads.dim - d, kElements);
                    P::along(at + d, count).store(slots + d / P::kDepth, ceil_div(count, P::kDepth));
                }
                for (int64_t slot = used; slot < slots_; ++slot)
                    slots[slot] = 0.0f;
            }
        });
        for (int64_t r = 0; r < rows_; ++r) {
            room_.slope[r] = a_.mask->alibi ? a_.mask->alibi[head_of(r)] * kLog2E : 0.0f;
            room_.top[r] = kNothing;
            float* total = room_.total + r * Vec::kWidth;
            Vec::set(0).store(total);
            if (a_.mask->sinks && item_.part == 0) {
                read_row(a_.mask->sinks, a_.mask->sinks_dtype, head_of(r), room_.top + r, 1);
                room_.top[r] *= kLog2E;
                total[0] = room_.top[r] <= kNothing ? 0.0f : 1.0f; // a lower sink weighs nothing
                room_.top[r] = room_.top[r] <= kNothing ? kNothing : room_.top[r];
            }
        }
        clear(room_.sums, rows_ * width_);
    }

    static void clear(float* x, int64_t n) { std::memset(x, 0, static_cast<size_t>(n) * sizeof(float)); }

    // Compute the token index in the views of each key in [key, key + n).
    void locate(int64_t key, int64_t n, int64_t* at) const {
        if (!a_.pages) {
            for (int64_t j = 0; j < n; ++j)
                at[j] = item_.keys_at + key + j;
            return;
        }
        const int64_t size = a_.pages->block_size;
        const int32_t* page = a_.pages->table + item_.sequence * a_.pages->table_width + key / size;
        const int64_t apart = a_.pages->heads_first ? size * a_.heads.kv_heads : size;
        for (int64_t j = 0, within = key % size; j < n; ++j) {
            at[j] = *page * apart + within;
            if (++within == size) {
                within = 0;
                ++page;
            }
        }
    }

    template <class T>
    const T* row(const View& view, int64_t head, int64_t at) const {
        return static_cast<const T*>(view.data) + item_.sequence * view.sequence + head * view.head +
               at * view.token;
    }

    // Prefetch the next tile's rows while this one is processed: they are scattered, so that no hardware
    // prefetcher predicts them in time.
    template <class T>
    void fetch(const View& view, int64_t head, int64_t n) const {
        const int64_t bytes = a_.heads.dim * static_cast<int64_t>(sizeof(T));
        for (int64_t j = 0; j < n; ++j) {
            const char* p = reinterpret_cast<const char*>(row<T>(view, head, next_[j]));
            for (int64_t line = 0; line < bytes; line += 64)
                prefetch(p + line);
        }
    }

    // Pointers to the unpacked keys and values of one kv head.
    template <class T>
    struct Found {
        const T *keys[kTileKeys], *values[kTileKeys];
        int64_t n;
    };
    template <class T>
    void find(int64_t head, const int64_t* at, int64_t n, Found<T>& found) const {
        const T *keys = row<T>(a_.k, head, 0), *values = row<T>(a_.v, head, 0);
        for (int64_t j = 0; j < n; ++j) {
            found.keys[j] = keys + at[j] * a_.k.token;
            found.values[j] = values + at[j] * a_.v.token;
        }
        found.n = n;
    }

    // Process the keys in place, tile by tile and kv head by kv head; prefetch the next ones in between.
    template <class T>
    void go_through(int64_t first, int64_t end) {
        const int64_t bytes = a_.heads.dim * static_cast<int64_t>(sizeof(T));
        Found<T> both[2], *now = both, *next = both + 1;
        find(item_.kv, next_, most(0, least(kFewKeys, end - first)), *next);
        Soon<T>{next->keys, next->n, bytes}.ask(0, kFewKeys);
        for (int64_t key = first; key < end; key += kFewKeys) {
            const int64_t n = least(kFewKeys, end - key);
            std::memcpy(at_, next_, sizeof(at_));
            locate(key + n, most(0, least(kFewKeys, end - key - n)), next_);
            for (int64_t kv = 0; kv < item_.kvs; ++kv) {
                std::swap(now, next);
                if (key == first && kv == 0)
                    Soon<T>{now->values, now->n, bytes}.ask(0, kFewKeys);
                if (kv + 1 < item_.kvs)
                    find(item_.kv + kv + 1, at_, n, *next);
                else
                    find(item_.kv, next_, most(0, least(kFewKeys, end - key - n)), *next);
                strips<T>(kv, key, n, now->keys, now->values, {next->keys, next->n, bytes},
                          {next->values, next->n, bytes});
            }
        }
    }

    // Process the keys by packing each tile of keys and values into a layout that its many rows share.
    template <class T>
    void pack_through(int64_t first, int64_t end) {
        Found<T> found;
        for (int64_t key = first; key < end; key += kTileKeys) {
            const int64_t n = least(kTileKeys, end - key), coming = most(0, least(kTileKeys, end - key - n));
            std::memcpy(at_, next_, sizeof(at_));
            locate(key + n, coming, next_);
            for (int64_t kv = 0; kv < item_.kvs; ++kv) {
                const int64_t head = item_.kv + kv;
                find(head, at_, n, found);
                fetch<T>(a_.k, head, coming);
                pack_keys<P>(found.keys, n, a_.heads.dim, room_.keys);
                fetch<T>(a_.v, head, coming);
                pack_values<P>(found.values, n, a_.heads.dim, width_, room_.values);
                const int64_t used = ceil_div(n, P::kDepth);
                clear(room_.values + used * width_, (ceil_div(used, P::kSlots) * P::kSlots - used) * width_);
                strips<T>(kv, key, n, found.keys, found.values, {}, {});
            }
        }
    }

    // Process all rows of one kv head against keys [key, key + n).
    template <class T>
    void strips(int64_t kv, int64_t key, int64_t n, const T* const* keys, const T* const* values,
                Soon<T> soon_keys, Soon<T> soon_values) {
        if (a_.k_scales)
            for (int64_t j = 0; j < ceil_div(n, P::kKeys) * P::kKeys; ++j) {
                const int64_t place = at_[least(j, n - 1)] * a_.heads.kv_heads + item_.kv + kv;
                room_.k_scales[j] = a_.k_scales[place];
                room_.v_scales[j] = a_.v_scales[place];
            }
        const int64_t end = (kv + 1) * group_ * item_.count;
        for (int64_t r = kv * group_ * item_.count; r < end; r += P::kStripRows) {
            const int64_t count = least(P::kStripRows, end - r);
            strip<T>(r, count, key, n,
                     {room_.q + r * slots_, slots_, keys, values, n, a_.heads.dim, soon_keys, soon_values});
            soon_keys.n = soon_values.n = 0;
        }
    }

    // The keys [first, end) that causality and window allow for the query at a position.
    int64_t first_of(int64_t position) const {
        const int64_t window = a_.mask->window, chunk = a_.mask->chunk;
        return chunk     ? position - position % chunk
               : !window ? 0
                         : position - (a_.causal ? window - 1 : window / 2);
    }
    int64_t end_of(int64_t position) const {
        return a_.causal ? position + 1 : a_.mask->window ? position + a_.mask->window / 2 + 1 : item_.end;
    }

    // Compute the range [from, to) within [key, key + n) that a row sees.
    void range(int64_t row, int64_t key, int64_t n, int64_t& from, int64_t& to) const {
        const int64_t position = item_.position + room_.query[row];
        to = most(0, least(n, end_of(position) - key));
        from = least(to, most(0, first_of(position) - key));
    }

    // Whether each row of a strip sees all keys from `key` up to its own end, with no modification of the
    // scores but the scale.
    bool sees_plainly(int64_t row, int64_t count, int64_t key) const {
        const Mask& mask = *a_.mask;
        if (mask.alibi || mask.relative || a_.bias || a_.k_scales || mask.softcap != 0.0f ||
            !(mask.scale > 0.0f))
            return false;
        const bool one_head = room_.head[row] == room_.head[row + count - 1],
                   all = !mask.window && !mask.chunk;
        const int64_t last = one_head ? room_.query[row + count - 1] : item_.count - 1;
        return all || first_of(item_.position + last) <= key;
    }

    // Process a strip for which `sees_plainly` holds.
    void plain_strip(int64_t row, int64_t count, int64_t key, int64_t n) {
        int64_t ends[kMostStripRows], high = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int64_t position = item_.position + room_.query[row + i];
            ends[i] = most(0, least(n, end_of(position) - key));
            high = most(high, ends[i]);
        }
        if (!high)
            return;
        const int64_t width = ceil_div(high, P::kKeys) * P::kKeys;
        P::template multiply<false>(room_.q + row * slots_, slots_, count, room_.keys, kTileKeys, slots_,
                                    width, room_.scores, kTileKeys);
        const auto scores = [&](int64_t i) {
            return PlainRow{room_.scores + i * kTileKeys, ends[i], width, a_.mask->scale * kLog2E};
        };
        float highest[kMostStripRows]; // all rows first, so that the reductions are independent of each other
        for (int64_t i = 0; i < count; ++i)
            highest[i] = scores(i).highest();
        for (int64_t i = 0; i < count; ++i)
            weigh_plain<P>(scores(i), highest[i], room_.weights + i * kTileKeys, room_.top + row + i,
                           room_.total + (row + i) * Vec::kWidth, room_.sums + (row + i) * width_, width_);
        P::template multiply<true>(room_.weights, kTileKeys, count, room_.values, width_,
                                   ceil_div(high, P::kDepth), width_, room_.sums + row * width_, width_);
    }

    template <class T>
    void strip(int64_t row, int64_t count, int64_t key, int64_t n, FewRows<P, T> direct) {
        if (!few_ && sees_plainly(row, count, key))
            return plain_strip(row, count, key, n);
        int64_t low = n, high = 0, from, to;
        for (int64_t r = row; r < row + count; ++r) {
            range(r, key, n, from, to);
            if (from < to) {
                low = least(low, from);
                high = most(high, to);
            }
        }
        if (low >= high)
            return;
        low = low / P::kKeys * P::kKeys;
        high = ceil_div(high, P::kKeys) * P::kKeys;
        direct.keys += low;
        direct.values += low;
        direct.n = least(high, n) - low;
        if (few_)
            direct.score(count, room_.scores + low);
        else
            P::template multiply<false>(room_.q + row * slots_, slots_, count, room_.keys + low, kTileKeys,
                                        slots_, high - low, room_.scores + low, kTileKeys);
        for (int64_t i = 0; i < count; ++i) {
            range(row + i, key, n, from, to);
            soften(row + i, room_.scores + i * kTileKeys, room_.weights + i * kTileKeys, key,
                   {low, high, from, to});
        }
        const int64_t begin = low / P::kDepth, depth = ceil_div(least(high, n), P::kDepth) - begin;
        if (few_)
            return direct.mix(count, room_.weights + begin, room_.sums + row * width_, width_);
        P::template multiply<true>(room_.weights + begin, kTileKeys, count, room_.values + begin * width_,
                                   width_, depth, width_, room_.sums + row * width_, width_);
    }

    void soften(int64_t row, float* scores, float* weights, int64_t key, const Seen& keys) {
        const Mask& mask = *a_.mask;
        const bool capped = mask.softcap != 0.0f;
        const Bend b = {capped ? mask.scale / mask.softcap : mask.scale * kLog2E,
                        mask.softcap * kLog2E,
                        room_.slope[row],
                        static_cast<float>(key - item_.position - room_.query[row]),
                        a_.k_scales ? room_.k_scales : nullptr,
                        a_.v_scales ? room_.v_scales : nullptr,
                        a_.bias         ? read_bias(row, key, keys.from, keys.to)
                        : mask.relative ? read_relative(row, key, keys.from, keys.to)
                                        : nullptr};
        const bool plain = is_plain(b, keys);
        const float scale = plain ? b.scale : 1.0f;
        const float highest = plain ? scale * highest_of(scores, keys) : bend(b, scores, keys);
        float *total = room_.total + row * Vec::kWidth, *top = room_.top + row;
        if (highest > *top) {
            const Vec factor = power<7>(Vec::set(*top - highest));
            *top = highest;
            scale_all(total, factor, Vec::kWidth);
            scale_all(room_.sums + row * width_, factor, width_);
        }
        weigh<P>(b, scores, scale, keys, *top, weights, total);
    }

    const float* read_bias(int64_t row, int64_t key, int64_t from, int64_t to) {
        const Scores& bias = *a_.bias;
        const int64_t at = place(bias, row) + key;
        if (bias.dtype == kBoolean) {
            const auto* seen = static_cast<const uint8_t*>(bias.data) + at;
            for (int64_t j = from; j < to; ++j)
                room_.bias[j] = seen[j] ? 0.0f : kNever;
            return room_.bias;
        }
        read_row(bias.data, bias.dtype, at + from, room_.bias + from, to - from);
        for (int64_t j = from; j < to; ++j) {
            const float x = room_.bias[j] * kLog2E;
            room_.bias[j] = room_.bias[j] < -kGreatest ? kNever : x < kHidden ? kHidden : x;
        }
        return room_.bias;
    }

    const float* read_relative(int64_t row, int64_t key, int64_t from, int64_t to) {
        const float* by = a_.mask->relative + head_of(row) * a_.mask->reach + a_.mask->zero;
        const int64_t last = item_.position + room_.query[row] - key;
        for (int64_t j = from; j < to; ++j)
            room_.bias[j] = by[last - j] * kLog2E;
        return room_.bias;
    }

    void write(int64_t row, float* sums, float total) {
        scale_all(sums, Vec::set(total > 0.0f ? 1.0f / total : 0.0f), width_);
        const int64_t at = place(a_.out, row);
        write_row(sums, const_cast<void*>(a_.out.data), a_.out.dtype, at, a_.heads.dim);
        if (a_.rounded)
            copy_row(sums, a_.rounded + at, a_.heads.dim);
    }

    void keep(float* partial) {
        for (int64_t r = 0; r < rows_; ++r, partial += width_ + 2) {
            std::memcpy(partial, room_.sums + r * width_, static_cast<size_t>(width_) * sizeof(float));
            partial[width_] = room_.top[r];
            partial[width_ + 1] = total_of(r);
        }
    }

    const Attention& a_;
    const Item& item_;
    const int64_t slots_, width_; // slots in a row of queries, floats in a row of sums
    const ItemRoom room_;
    const int64_t group_, rows_;
    const bool few_;                          // rows multiply with keys and values in place
    int64_t at_[kTileKeys], next_[kTileKeys]; // token indices of this tile's keys, and of the next tile's
};

} // namespace
} // namespace slipstream
