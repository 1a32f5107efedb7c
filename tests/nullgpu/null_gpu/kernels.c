// Kernels of vLLM's second model runner that count tokens and look blocks up. The host reads what
// they count: without them no request ever gets a token. They are computed on the host; tokens are
// not.
#include "kernels.h"

#include <elf.h>
#include <stdio.h>

#include "null_gpu.h"

typedef const union null_gpu_argument* arguments;

static int* ints(union null_gpu_argument of) { return (int*)of.pointer; }

static long long* longs(union null_gpu_argument of) { return (long long*)of.pointer; }

// Runs without requests, as for a warm-up, have states that a kernel of torch would have written.
static int most_requests;

static int is_state(long long state) { return state >= 0 && state < most_requests; }

// ---- buffer_utils.py

// Output, its stride, rows, first places in them, contents, ends of each one's content.
static void apply_write(arguments a, int blocks, int unused) {
  for (int i = 0; i < blocks; i++) {
    int begin = i ? ints(a[5])[i - 1] : 0;
    int* row = ints(a[0]) + (long long)ints(a[2])[i] * a[1].number + ints(a[3])[i];
    memcpy(row, ints(a[4]) + begin, (ints(a[5])[i] - begin) * sizeof(int));
  }
}

// ---- input_batch.py

// Positions, lengths, states of the requests, starts of their queries, computed tokens, most
// requests.
static void prepare_positions(arguments a, int blocks, int unused) {
  int num_requests = blocks - 1;
  most_requests = a[5].number;
  for (int i = 0; i < num_requests; i++) {
    int computed = is_state(longs(a[2])[i]) ? ints(a[4])[longs(a[2])[i]] : 0;
    int start = ints(a[3])[i], length = ints(a[3])[i + 1] - start;
    ints(a[1])[i] = computed + length;
    for (int j = 0; j < length; j++) longs(a[0])[start + j] = computed + j;
  }
  for (int i = num_requests; i < a[5].number; i++) ints(a[1])[i] = 0;
}

// Sampled and rejected tokens, lengths, starts of the logits, states, lengths of the prompts. One
// token is sampled after a prompt's last and none is rejected: torch's kernels would have written
// the numbers of sampled tokens and the starts of the logits, and have not.
static void count_sampled(arguments a, int blocks, int unused) {
  for (int i = 0; i < blocks; i++) {
    long long state = longs(a[4])[i];
    ints(a[0])[i] = is_state(state) && ints(a[2])[i] >= ints(a[5])[state];
    ints(a[1])[i] = 0;
  }
}

// States, computed tokens, last tokens, counts of tokens and their stride, sampled tokens and their
// stride, numbers of sampled and of rejected ones, starts of the queries, all tokens and their
// stride, lengths.
static void note_step(arguments a, int blocks, int unused) {
  for (int i = 0; i < blocks; i++) {
    long long state = longs(a[0])[i];
    if (!is_state(state)) continue;
    ints(a[12])[state] += ints(a[7])[i];
    ints(a[1])[state] += ints(a[9])[i + 1] - ints(a[9])[i] - ints(a[8])[i];
  }
}

// ---- block_table.py

// States, addresses of the tables of all requests and of the step, their strides, numbers of blocks
// and their stride, number of requests.
static void gather_tables(arguments a, int groups, int rows) {
  for (int group = 0; group < groups; group++) {
    long long stride = longs(a[3])[group];
    int* all = (int*)longs(a[1])[group];
    int* of_step = (int*)longs(a[2])[group];
    for (int row = 0; row < rows; row++) {
      int* target = of_step + row * stride;
      if (row >= a[6].number) {
        memset(target, 0, stride * sizeof(int));
        continue;
      }
      long long state = longs(a[0])[row];
      if (!is_state(state)) continue;
      int num_blocks = ints(a[4])[group * a[5].number + state];
      memcpy(target, all + state * stride, num_blocks * sizeof(int));
    }
  }
}

// Most tokens, states, starts of the queries, positions, addresses of the tables, their strides,
// tokens per block, whether a group has slots, whether it is shared, slots and their stride, rank.
static void map_slots(arguments a, int groups, int rows) {
  for (int group = 0; group < groups; group++) {
    long long* slots = longs(a[9]) + (long long)group * a[10].number;
    int size = ints(a[6])[group];
    for (int row = 0; row < rows - 1; row++) {
      long long state = longs(a[1])[row];
      const int* table = (int*)longs(a[4])[group] + state * longs(a[5])[group];
      for (int i = ints(a[2])[row]; i < ints(a[2])[row + 1]; i++) {
        long long position = longs(a[3])[i];
        int has_slot = a[7].pointer[group] && is_state(state);
        slots[i] = has_slot ? (long long)table[position / size] * size + position % size : -1;
      }
    }
    for (int i = ints(a[2])[rows - 1]; i < a[0].number; i++) slots[i] = -1;
  }
}

// ---- loading and launching

static const struct null_gpu_kernel kernels[] = {
    {"_apply_write_kernel", "pipppp", apply_write},
    {"_prepare_pos_seq_lens_kernel", "pppppi", prepare_positions},
    {"_get_num_sampled_and_rejected_kernel", "pppppp", count_sampled},
    {"_post_update_kernel", "ppppipippppip", note_step},
    {"_gather_block_tables_kernel", "pppppii", gather_tables},
    {"_compute_slot_mappings_kernel", "ipppppppppii", map_slots},
};

enum { KERNEL_PARAMETER = 0x17, HAS_SIZE = 0x04, SCRATCH_ARGUMENTS = 2 };

// Returns the number of arguments that a kernel's section of a cubin names, and their sizes.
static int read_sizes(const char* cubin, const char* name, int* sizes) {
  const Elf64_Ehdr* header = (const Elf64_Ehdr*)cubin;
  const Elf64_Shdr* sections = (const Elf64_Shdr*)(cubin + header->e_shoff);
  const char* names = cubin + sections[header->e_shstrndx].sh_offset;
  char wanted[256];
  int count = 0;
  snprintf(wanted, sizeof wanted, ".nv.info.%s", name);
  for (int i = 0; i < header->e_shnum; i++) {
    if (strcmp(names + sections[i].sh_name, wanted)) continue;
    const unsigned char* at = (const unsigned char*)cubin + sections[i].sh_offset;
    const unsigned char* end = at + sections[i].sh_size;
    while (at + 4 <= end) {
      const unsigned short* words = (const unsigned short*)at;
      if (at[0] == HAS_SIZE && at[1] == KERNEL_PARAMETER && words[4] < NULL_GPU_MOST_ARGUMENTS) {
        sizes[words[4]] = *(const unsigned*)(at + 12) >> 18;
        count++;
      }
      at += at[0] == HAS_SIZE ? 4 + words[1] : 4;
    }
  }
  return count - SCRATCH_ARGUMENTS;
}

static int size_of(char letter) { return letter == 'p' ? sizeof(char*) : sizeof(int); }

void null_gpu_load(struct null_gpu_function* function, const char* cubin, const char* name) {
  memset(function, 0, sizeof *function);
  for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
    if (strcmp(kernels[i].name, name) || memcmp(cubin, ELFMAG, SELFMAG)) continue;
    int count = read_sizes(cubin, name, function->sizes), place = 0;
    for (const char* letter = kernels[i].arguments; *letter; letter++)
      if (place < count && function->sizes[place] == size_of(*letter))
        place++;
      else if (*letter == 'p')
        place = NULL_GPU_MOST_ARGUMENTS;
    if (place == count)
      function->kernel = &kernels[i];
    else
      fprintf(stderr, "null GPU: %s has other arguments, it does nothing\n", name);
  }
}

void null_gpu_launch(const struct null_gpu_function* function, void** given, int blocks_x,
                     int blocks_y) {
  union null_gpu_argument found[NULL_GPU_MOST_ARGUMENTS];
  int place = 0;
  for (int i = 0; function->kernel->arguments[i]; i++) {
    char letter = function->kernel->arguments[i];
    if (letter == 'p')
      found[i].pointer = *(char**)given[place++];
    else
      found[i].number = function->sizes[place] == sizeof(int) ? *(int*)given[place++] : 1;
  }
  function->kernel->run(found, blocks_x, blocks_y);
}
