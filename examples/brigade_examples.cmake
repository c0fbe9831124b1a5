# Interface libraries of the examples, which tests use too.
include_guard(GLOBAL)

add_library(brigade_digits INTERFACE)
target_compile_definitions(
  brigade_digits INTERFACE DIGITS_DATA_FILE="${PROJECT_SOURCE_DIR}/examples/digits/data/digits.u8")
target_link_libraries(brigade_digits INTERFACE Torch::cpu)

add_library(brigade_gpt INTERFACE)
target_compile_definitions(
  brigade_gpt INTERFACE GPT_TEXT_FILE="${PROJECT_SOURCE_DIR}/examples/gpt/data/as_you_like_it.txt")
target_link_libraries(brigade_gpt INTERFACE brigade::fsdp)
