#include "ties.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace slipstream {

void keep_top(float* scores, int64_t n, int64_t k, float nothing) {
    if (k >= n)
        return;
    std::vector<std::pair<float, int64_t>> queue(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i)
        queue[static_cast<size_t>(i)] = {scores[i], i};
    const auto precedes = [](const std::pair<float, int64_t>& a, const std::pair<float, int64_t>& b) {
        return (a.first != a.first && b.first == b.first) || a.first > b.first;
    };
    const auto end = queue.begin() + k;
    if (k * 64 <= n)
        std::partial_sort(queue.begin(), end, queue.end(), precedes);
    else
        std::nth_element(queue.begin(), end - 1, queue.end(), precedes);
    std::for_each(end, queue.end(), [&](const auto& one) { scores[one.second] = nothing; });
}

} // namespace slipstream
