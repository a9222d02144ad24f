// The block program of cuda/views.h with several real threads a block, beside the one-thread block
// of the product: both must make the same views, bit for bit.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "threads_of_a_block.h"
#include "views.h"

using namespace fastaug;

constexpr int SIZE = 11;

// Memory of exactly the size that each part may have.
struct Memory {
  Memory(const View& view, const std::vector<Layer>& layers, const Form& form, int strip_rows)
      : room(view, layers.data(), form), first(room.first), second(room.second), box(room.box),
        out(3 * SIZE * SIZE) {
    const Side x(view.box_width, SIZE, form.filter), y(view.box_height, SIZE, form.filter);
    scratch = aligned(numbers, Layout(SIZE, LANES, x, y, strip_rows).size);
  }
  template <class Block>
  void run(Block& block, const View& view, const std::vector<Layer>& layers, const Form& form,
           int strip_rows) {
    ViewProgram<Block, float>(block, view, layers.data(), form, scratch, first.data(),
                              second.data(), room.box ? box.data() : nullptr, strip_rows)
        .run(out.data());
  }
  const Room room;
  std::vector<byte> first, second, box;
  std::vector<float> out, numbers;
  float* scratch;
};

struct Cases {
  std::mt19937 random{0};
  int number = 0, wrong = 0;

  void compare(Form form, std::vector<Layer> layers, const int (&box)[4], int teams, int lanes,
               int strip_rows) {
    const int height = 19, width = 23, row_bytes = 3 * width + 5;
    std::vector<byte> image(height * row_bytes - 5);
    for (byte& level : image) level = (byte)random();
    const View view = {image.data(), row_bytes, height, width, box[0], box[1], box[2], box[3],
                       number % 2};
    form.layers = (int)layers.size();
    Memory alone(view, layers, form, 1), together(view, layers, form, strip_rows);
    OneThread one;
    alone.run(one, view, layers, form, 1);
    run_block(teams, lanes, [&](Threaded& block) {
      together.run(block, view, layers, form, strip_rows);
    });
    ++number;
    if (std::memcmp(alone.out.data(), together.out.data(), 4 * alone.out.size()) == 0) return;
    ++wrong;
    std::printf("case %d: operation %d, %d x %d, %d teams of %d, strips of %d: differs\n", number,
                layers.empty() ? -1 : layers[0].operation, box[2], box[3], teams, lanes, strip_rows);
  }
};

Layer layer_of(int operation) {
  Layer layer = {{1.6, 0, 0, 0, 0, 0}, operation, 0};
  const double turned[6] = {0.9, -0.4, 2.1, 0.4, 0.9, -1.3}, cut[6] = {-1, 2, 5, 30};
  if (operation == MOVE) std::memcpy(layer.numbers, turned, sizeof turned);
  if (operation == CUTOUT) std::memcpy(layer.numbers, cut, sizeof cut);
  if (operation == POSTERIZE) layer.numbers[0] = 0xf0;
  if (operation == SOLARIZE || operation == SOLARIZE_ADD) layer.numbers[0] = 77;
  return layer;
}

int main() {
  // More teams than rows of a strip and fewer, which share a row unevenly.
  const int blocks[][3] = {{1, 2, 3}, {2, 1, 1}, {3, 2, 2}, {5, 1, 2}, {4, 1, SIZE}};
  // Enlarged, shrunk, copied, beyond the image.
  const int boxes[][4] = {{3, 4, 5, 6}, {0, 0, 19, 23}, {4, 5, SIZE, SIZE}, {-4, 9, 16, 31}};
  Cases cases;
  Form form = {SIZE, 0, REFLECT, {0, 0}, {120, 110, 100}, {0.1f, 0.2f, 0.3f}};
  for (auto [teams, lanes, rows] : blocks) {
    for (const auto& box : boxes)
      for (int mode = 0; mode < 4; ++mode) {
        form.filter = {mode & 1, mode >> 1};
        form.border = mode;
        cases.compare(form, {}, box, teams, lanes, rows);
      }
    for (int operation = NOTHING; operation <= CUTOUT; ++operation)
      cases.compare(form, {layer_of(operation), layer_of(SHARPNESS), layer_of(operation)},
                    boxes[operation % 4], teams, lanes, rows);
  }
  std::printf("%d cases, %d differ\n", cases.number, cases.wrong);
  return cases.wrong != 0;
}
