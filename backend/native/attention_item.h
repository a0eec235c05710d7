// One item of attention, tile by tile.
#pragma once

#include "attention.h"
#include "pair_tiles.h"
#if defined(MTP_AMX)
#include "attention_values_amx.h"
#else
#include "attention_values.h"
#endif
#include "attention_softmax.h"

namespace {

using mtp::ATTENTION_QUERIES;
using mtp::ATTENTION_TILE;
using mtp::Attention;
using mtp::AttentionItem;

// e^(score · scale) as a power of 2.
inline float powers_scale(const Attention& job) { return job.scale * 1.44269504f; }

// The memory of one thread, laid out for any item of a job. Without an address it only counts the bytes.
struct AttentionMemory {
  char* next;
  std::int64_t bytes = 0;
  std::int64_t* slots;                   // of the positions of a tile
  RowTile *keys[2], *values;
  bf16 *staged[2], *staged_values;       // what does not lie in tiles
  PairTiles queries[2];
  Weights weights;
  ValueProduct value_product;
  float *scores, *greatest, *sums, *tile, *total;
  std::int32_t *limits, *selected;
  std::uint64_t* is_selected;

  AttentionMemory(const Attention& job, void* address) : next(static_cast<char*>(address)) {
    take(slots, ATTENTION_TILE);
    for (int part = 0; part < job.parts; ++part) {
      std::int64_t width = round_up(job.keys[part].width, STEP);
      take(keys[part], ATTENTION_TILE / BLOCK);
      take(staged[part], ATTENTION_TILE * width);
      Pair* pairs;
      take(pairs, width / 2 * ATTENTION_QUERIES);
      queries[part] = {pairs, width / STEP, 0};
    }
    std::int64_t value_width = round_up(job.values.width, STEP);
    take(values, ATTENTION_TILE / BLOCK);
    take(staged_values, ATTENTION_TILE * value_width);
    take(weights.data, Weights::elements(ATTENTION_QUERIES, ATTENTION_TILE));
    value_product.take_memory(value_width, [&](auto*& part, std::int64_t count) { take(part, count); });
    take(scores, ATTENTION_TILE * ATTENTION_QUERIES);
    take(greatest, ATTENTION_QUERIES);
    take(sums, ATTENTION_QUERIES);
    take(tile, ATTENTION_QUERIES * mtp::partial_size(job.values.width));
    take(total, ATTENTION_QUERIES * mtp::partial_size(job.values.width));
    take(limits, ATTENTION_QUERIES);
    take(selected, job.top_k);
    take(is_selected, job.top_k ? positions(job) / 64 + 1 : 0);
  }

  // That the block tables can name.
  static std::int64_t positions(const Attention& job) { return job.table_stride * job.block_size; }

  template <typename T>
  void take(T*& part, std::int64_t count) {
    part = next ? reinterpret_cast<T*>(next + bytes) : nullptr;
    bytes += round_up(count * sizeof(T), 64);
  }
};

struct AttendItem {
  const Attention& job;
  const AttentionItem& item;
  bool fetched;               // the keys of the first tile are here
  const AttentionItem* next;  // whose first tile is fetched over the last one, or null
  AttentionMemory& memory;
  std::int64_t columns, stride;  // queries in multiples of 16; elements of a partial result
  std::int64_t length;           // positions that the item's last query sees
  float scale;

  AttendItem(const Attention& job, const AttentionItem& item, bool fetched, const AttentionItem* next,
             AttentionMemory& memory)
      : job(job), item(item), fetched(fetched), next(next), memory(memory) {
    columns = round_up(item.queries, BLOCK);
    stride = mtp::partial_size(job.values.width);
    scale = powers_scale(job);
    length = item.selected < 0 ? item.length(job.group()) : gather_selection();
    for (int part = 0; part < job.parts; ++part) {
      const Attention::Queries& from = job.queries[part];
      memory.queries[part] = {memory.queries[part].data, memory.queries[part].steps, columns / BLOCK};
      pack_columns(memory.queries[part], item.queries, from.width,
                   [&](std::int64_t i) { return from.data + row(i) * from.row_stride + head(i) * from.head_stride; });
    }
  }

  std::int64_t row(std::int64_t i) const { return item.first_row + (item.first_query + i) / job.group(); }
  std::int64_t head(std::int64_t i) const {
    return item.kv_head * job.group() + (item.first_query + i) % job.group();
  }
  std::int64_t position(std::int64_t i) const { return item.first_position + row(i) - item.first_row; }
  static std::int64_t positions_in(std::int64_t tile, std::int64_t length) {
    std::int64_t left = length - tile * ATTENTION_TILE;
    return left < 0 ? 0 : least(ATTENTION_TILE, left);
  }

  // The row's selection in the order of positions, so that nothing depends on the order in which it names them.
  std::int64_t gather_selection() const {
    const std::int32_t* given = job.selection + item.first_row * job.top_k;
    std::int64_t positions = AttentionMemory::positions(job), count = 0;
    __builtin_memset(memory.is_selected, 0, (positions / 64 + 1) * sizeof(std::uint64_t));
    for (std::int64_t i = 0; i < item.selected; ++i)
      if (given[i] < positions) memory.is_selected[given[i] / 64] |= std::uint64_t(1) << given[i] % 64;
    for (std::int64_t word = 0; word <= positions / 64; ++word)
      for (std::uint64_t bits = memory.is_selected[word]; bits; bits &= bits - 1)
        memory.selected[count++] = std::int32_t(word * 64 + __builtin_ctzll(bits));
    return count;
  }

  std::int64_t slot_of(std::int64_t sequence, std::int64_t position) const {
    const std::int64_t* table = job.block_tables + sequence * job.table_stride;
    return table[position / job.block_size] * job.block_size + position % job.block_size;
  }

  // Keys and values of a tile of an item, to be fetched over the products of `blocks` tiles of 16 positions.
  RowsAhead rows_ahead(const AttentionItem& of, std::int64_t tile, std::int64_t blocks) const {
    RowsAhead ahead;
    std::int64_t count = positions_in(tile, of.length(job.group()));
    for (std::int64_t first = 0; first < count; first += BLOCK) {
      std::int64_t slot = slot_of(of.sequence, tile * ATTENTION_TILE + first);
      auto add = [&](const Attention::Cache& cache) {
        ahead.add({cache.data + of.kv_head * cache.head_stride + slot * cache.slot_stride, cache.slot_stride}, cache.width);
      };
      for (int part = 0; part < job.parts; ++part) add(job.keys[part]);
      if (!values_are_keys()) add(job.values);
    }
    std::int64_t width = round_up(job.values.width, STEP);
    for (int part = 0; part < job.parts; ++part) width += round_up(job.keys[part].width, STEP);
    ahead.spread_over(columns * blocks * (width / STEP));
    return ahead;
  }

  // `memory.slots` for a tile.
  void find_slots(std::int64_t tile) const {
    std::int64_t begin = tile * ATTENTION_TILE, count = positions_in(tile, length), size = job.block_size;
    for (std::int64_t j = 0; j < count;) {
      std::int64_t at = item.selected < 0 ? begin + j : memory.selected[begin + j];
      std::int64_t slot = slot_of(item.sequence, at);
      std::int64_t end = item.selected < 0 ? least(count, j + size - at % size) : j + 1;
      for (; j < end; ++j) memory.slots[j] = slot++;
    }
  }

  // Keys or values as tiles of rows: where they lie if 16 lie one behind the other, else copied.
  void find_tiles(const Attention::Cache& cache, std::int64_t count, RowTile* tiles, bf16* staged) const {
    const std::int64_t* slots = memory.slots;
    const bf16* data = cache.data + item.kv_head * cache.head_stride;
    std::int64_t width = round_up(cache.width, STEP);
    for (std::int64_t first = 0; first < count; first += BLOCK) {
      bool apart = cache.width != width || first + BLOCK > count;
      for (std::int64_t j = 1; !apart && j < BLOCK; ++j) apart = slots[first + j] != slots[first] + j;
      if (!apart) {
        tiles[first / BLOCK] = {data + slots[first] * cache.slot_stride, cache.slot_stride};
        continue;
      }
      bf16* to = staged + first * width;
      tiles[first / BLOCK] = {to, width};
      for (std::int64_t j = first; j < first + BLOCK; ++j, to += width) {
        std::int64_t given = j < count ? cache.width : 0;
        if (given) __builtin_memcpy(to, data + slots[j] * cache.slot_stride, given * sizeof(bf16));
        __builtin_memset(to + given, 0, (width - given) * sizeof(bf16));
      }
    }
  }
  bool values_are_keys() const { return job.values.data == job.keys[0].data && job.values.width == job.keys[0].width; }

  // Reads the keys in the order in which they lie, four rows at a time: products read a line of each of 16, then the next,
  // which is too many places at once for the machine to see what comes next.
  void read_keys(std::int64_t count) const {
    for (std::int64_t tile = 0; tile * BLOCK < count; ++tile)
      for (int part = 0; part < job.parts; ++part)
        for (std::int64_t row = 0; row < BLOCK / 4; ++row)
          for (std::int64_t i = 0; i < job.keys[part].width; i += 32)
            for (std::int64_t j = row; j < BLOCK; j += BLOCK / 4) {
              const RowTile& keys = memory.keys[part][tile];
              (void)*reinterpret_cast<const volatile bf16*>(keys.data + j * keys.stride + i);
            }
  }

  // The partial results of all queries for a tile.
  void attend(std::int64_t tile, float* result) const {
    std::int64_t count = positions_in(tile, length), width = round_up(job.values.width, STEP);
    find_slots(tile);
    for (int part = 0; part < job.parts; ++part)
      find_tiles(job.keys[part], count, memory.keys[part], memory.staged[part]);
    const RowTile* values = memory.keys[0];
    if (!values_are_keys()) {
      find_tiles(job.values, count, memory.values, memory.staged_values);
      values = memory.values;
    }
    bool first = tile == item.first_tile, last = tile + 1 == item.first_tile + item.tiles;
    if (item.few_queries() && !(first ? fetched : item.fetches())) read_keys(count);
    RowsAhead ahead;
    std::int64_t blocks = (count + BLOCK - 1) / BLOCK;
    if (last && next)
      ahead = rows_ahead(*next, next->first_tile, blocks);
    else if (!last && item.fetches())
      ahead = rows_ahead(item, tile + 1, blocks);
    for (int part = 0; part < job.parts; ++part)
      multiply(memory.keys[part], count, memory.queries[part], memory.scores, columns, part > 0, ahead);
    for (std::int64_t i = 0; i < columns; ++i)
      memory.limits[i] = std::int32_t(item.selected >= 0 || i >= item.queries
                                          ? count
                                          : least(count, position(i) + 1 - tile * ATTENTION_TILE));
    softmax_tile(memory.scores, columns, count, columns / BLOCK, memory.limits, scale, memory.weights, memory.greatest,
                 memory.sums);
    for (std::int64_t i = 0; i < item.queries; ++i)
      result[i * stride] = memory.greatest[i], result[i * stride + 1] = memory.sums[i];
    memory.value_product.multiply(memory.weights, item.queries, values, count, width, result + mtp::PARTIAL_HEADER,
                                  stride, ahead);
  }
};

}  // namespace
