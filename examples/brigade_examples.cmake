# The parts of the examples that tests and benchmarks use too.
include_guard(GLOBAL)

# Header-only: LibTorch brings headers of a newer fmt, found first, and no library.
find_package(fmt REQUIRED)
find_package(ZLIB REQUIRED)

add_library(brigade_examples STATIC
  ${PROJECT_SOURCE_DIR}/examples/digits/batches.cc
  ${PROJECT_SOURCE_DIR}/examples/digits/dataset.cc
  ${PROJECT_SOURCE_DIR}/examples/digits/reference.cc
  ${PROJECT_SOURCE_DIR}/examples/support/progress_bar.cc)
brigade_set_flags(brigade_examples)
brigade_use_pch(brigade_examples)
target_compile_definitions(
  brigade_examples
  PRIVATE DIGITS_DATA_FILE="${PROJECT_SOURCE_DIR}/examples/digits/data/digits.csv.gz")
target_link_libraries(brigade_examples PUBLIC Torch::cpu PRIVATE fmt::fmt-header-only ZLIB::ZLIB)

add_library(brigade_gpt STATIC
  ${PROJECT_SOURCE_DIR}/examples/gpt/corpus.cc
  ${PROJECT_SOURCE_DIR}/examples/gpt/training.cc)
brigade_set_flags(brigade_gpt)
brigade_use_pch(brigade_gpt)
target_compile_definitions(
  brigade_gpt
  PRIVATE GPT_TEXT_FILE="${PROJECT_SOURCE_DIR}/examples/gpt/data/as_you_like_it.txt")
target_link_libraries(brigade_gpt PUBLIC brigade::fsdp PRIVATE fmt::fmt-header-only)
